"""Bubbles and activations that papers state in closed form, each under its own assumptions, exactly.

T_F, T_B and T_W of the zero-bubble paper are F, BI and BW here. The bubble is the longest time from a rank's
first start to its last end, less its passes. All closed forms side by side: `test_formula_table`.
"""

from fractions import Fraction

import pytest

from piper.schedules import parse_costs
from piper.schedules.preview import Preview, preview_rows, preview_schedule
from piper.schedules.rows import parse_rows
from simulator.plan.task import TaskKind
from tests.piper.schedules.published_pass_times import ROWS

COSTS = {
    "equal": "F=1,BI=1,BW=1",
    "a long forward": "F=3,BI=2,BW=1",
    "a long backward": "F=2,BI=3,BW=1",
    "the paper's 1.5B model": "F={T_F_ms},BI={T_B_ms},BW={T_W_ms}".format_map(ROWS["1.5B", 8, 24]),
}


def preview(name: str, p: int, m: int, costs: str) -> Preview:
    return preview_schedule(name, num_pipeline_ranks=p, num_microbatches=m, costs=parse_costs(costs))


def bubble(found: Preview) -> Fraction:
    passes = found.costs["F"] + found.costs["BI"] + found.costs["BW"]
    return found.longest_rank_span - found.num_microbatches * passes


ZERO_BUBBLE_TABLE_2 = {
    "1f1b": (
        lambda p, f, b, w: (p - 1) * (f + b + w),
        lambda p: p,
        lambda p, i: (p - i + 1, 0),
    ),
    "zb_h1": (
        lambda p, f, b, w: (p - 1) * (f + b - w),
        lambda p: p,
        lambda p, i: (p - i + 1, i - 1),
    ),
    "zb_h2": (
        lambda p, f, b, w: (p - 1) * (f + b - 2 * w),
        lambda p: 2 * p - 1,
        lambda p, i: (2 * p - 2 * i + 1, 2 * i - 2),
    ),
}
"""Qi et al. 2024 (arXiv 2401.10241), Table 2: bubble; peak activations in M_B; and of worker i (from 1) those
before B (M_B each) and those kept for W alone (M_W each). For enough microbatches to fill the warm-up."""


@pytest.mark.parametrize("name", ZERO_BUBBLE_TABLE_2)
@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_bubbles_and_activations_are_those_of_table_2_of_the_zero_bubble_paper(name, costs):
    formula, peak, of_worker = ZERO_BUBBLE_TABLE_2[name]
    for p in (1, 2, 4, 8):
        for m in (2 * p - 1, 2 * p, 3 * p, 4 * p + 1):
            found = preview(name, p, m, costs)
            want = formula(p, found.costs["F"], found.costs["BI"], found.costs["BW"])
            assert bubble(found) == want, (p, m)
            assert found.bubble_fraction_span == want / found.longest_rank_span
            assert max(found.in_flight) == peak(p)
            for worker, row in enumerate(found.spans, 1):
                assert activations_at_the_peak(row) == of_worker(p, worker)


def activations_at_the_peak(row) -> tuple[int, int]:
    """Return microbatches before their B, and those that wait for W alone, when most are held; first time."""
    whole = weights = 0
    peak = (0, 0)
    for task in (task for span in row for task in span.tasks):
        whole += {TaskKind.F: 1, TaskKind.B: -1, TaskKind.BI: -1}.get(task.kind, 0)
        weights += {TaskKind.BI: 1, TaskKind.BW: -1}.get(task.kind, 0)
        peak = max(peak, (whole, weights), key=sum)
    return peak


def test_zb_h2_ranks_with_equal_passes_are_never_idle_from_their_first_pass_to_their_last():
    for p, m in [(2, 3), (4, 7), (4, 16), (8, 15), (8, 40)]:
        found = preview("zb_h2", p, m, "")
        assert found.bubble_fraction_span == 0
        assert found.longest_rank_span == 3 * m
        assert found.makespan == 3 * m + p - 1


@pytest.mark.parametrize("v", [1, 2, 4])
def test_interleaving_divides_the_bubble_of_1f1b_by_the_stages_of_a_rank(v):
    """Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.2: (p - 1)(F + B) / v, for m a multiple of p.

    The costs here are those of one stage: a rank's passes of one microbatch take v (F + B).
    """
    for p, m in [(2, 2), (2, 6), (4, 4), (4, 16), (8, 8)]:
        found = preview_schedule(
            "interleaved_1f1b", num_pipeline_ranks=p, num_microbatches=m, virtual_stages_per_rank=v
        )
        assert found.makespan == (m * v + p - 1) * 3
        assert found.bubble_fraction == Fraction(p - 1, m * v + p - 1)


@pytest.mark.parametrize("v", [1, 2, 4])
@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_interleaving_zb_h1_leaves_its_bubble_in_passes_of_one_stage(v, costs):
    for p, m in [(2, 2), (2, 6), (4, 4), (4, 16), (8, 8)]:
        found = preview_schedule(
            "interleaved_zb", num_pipeline_ranks=p, num_microbatches=m, virtual_stages_per_rank=v,
            costs=parse_costs(costs),
        )  # fmt: skip
        f, b, w = (found.costs[name] for name in ("F", "BI", "BW"))
        assert found.longest_rank_span == m * v * (f + b + w) + (p - 1) * (f + b - w)


@pytest.mark.parametrize(
    ("name", "v", "held"),
    [
        ("looped_bfs", 2, lambda p, m: m),
        ("interleaved_1f1b", 2, lambda p, m: Fraction(min(2 * m, 3 * p - 1), 2)),
        ("interleaved_zb", 2, lambda p, m: Fraction(min(2 * m, 2 * p), 2)),
        ("interleaved_zb", 4, lambda p, m: Fraction(min(4 * m, 4 * p), 4)),
    ],
)
def test_several_stages_on_a_rank_hold_what_their_docstrings_say(name, v, held):
    for p, m in [(2, 2), (4, 4), (4, 12), (8, 16)]:
        found = preview_schedule(name, num_pipeline_ranks=p, num_microbatches=m, virtual_stages_per_rank=v)
        assert max(found.in_flight) == held(p, m)


CONTROLLABLE_MEMORY = {
    "zbv": (lambda p: 0, lambda p: p, 0),
    "v_half": (lambda p: 3 * (p - 1), lambda p: (p + 2) // 2, 0),
    "v_min": (lambda p: 4 * (p - 1), lambda p: (p + 4) // 3, 1),
}
"""Bubble in passes of a stage with T_F = T_B = T_W, where 1F1B has 6 (p - 1); microbatches in flight; and the
passes by which the bubble may be more. The authors' page: rates of B / 2 and 2 B / 3, B that of 1F1B, and
(p + 2) // 2 and (p + 4) // 3 microbatches."""


@pytest.mark.parametrize("name", CONTROLLABLE_MEMORY)
def test_bubbles_and_activations_in_a_v_are_within_those_of_the_controllable_memory_paper(name):
    bubble_bound, held, more = CONTROLLABLE_MEMORY[name]
    for p in (1, 2, 3, 4, 6, 7, 8, 12, 16):
        for m in (2 * p, 3 * p, 4 * p + 1):
            found = preview_schedule(
                name, num_pipeline_ranks=p, num_microbatches=m, virtual_stages_per_rank=2
            )
            assert 0 <= found.longest_rank_span - 6 * m <= bubble_bound(p) + more, (p, m)
            assert max(found.in_flight) == held(p)


def test_gpipe_and_1f1b_take_equally_many_slots_and_no_order_takes_fewer():
    """8 ranks, 32 microbatches, F = B = 1 slot: 78 slots and 7/39 idle for both, not 71 for 1F1B.

    A rank that ran F and B in turn from its slot r on, without waiting, would be done after 2 x 32 + 7 = 71:
    with the waiting that gradients need, the same rows take 16 slots for every microbatch.
    """
    half = "F=1,BI=1/2,BW=1/2"
    for name, in_flight in [("gpipe", 32), ("1f1b", 8)]:
        found = preview(name, 8, 32, half)
        assert found.makespan == 2 * (32 + 8 - 1) == 78
        assert found.bubble_fraction == Fraction(7, 39)
        assert max(found.in_flight) == in_flight
    in_turn = [[code for m in range(32) for code in (f"{r}F{m}", f"{r}B{m}")] for r in range(8)]
    rows = parse_rows(in_turn, where="test")
    found = preview_rows(rows, stages=tuple((r,) for r in range(8)), costs=parse_costs(half))
    assert found.makespan == 16 * 32


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b"])
def test_fewer_microbatches_than_ranks_are_legal_and_mostly_bubble(name):
    """One microbatch on 8 ranks: 16 slots, 7/8 of them idle; the last rank warms up with one forward."""
    found = preview(name, 8, 1, "F=1,BI=1/2,BW=1/2")
    assert found.makespan == 16
    assert found.bubble_fraction == Fraction(7, 8)
    assert [len(row) for row in found.rows] == [2] * 8


def test_1f1b_takes_twice_the_microbatches_and_other_stages_in_slots():
    """4 stages, 8 microbatches, F = B = 1 slot: 2 (8 + 4 - 1) = 22 slots, 27.3 % idle."""
    for p, m in [(4, 8), (1, 5), (2, 3), (8, 64)]:
        assert preview("1f1b", p, m, "F=1,BI=1/2,BW=1/2").makespan == 2 * (m + p - 1)
    assert float(preview("1f1b", 4, 8, "F=1,BI=1/2,BW=1/2").bubble_fraction) == pytest.approx(0.273, abs=5e-4)

"""Synthesised orders: legal, under the cap, never below the bound, never worse than what is known."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper.errors import StrategyError
from piper.schedules import parse_costs, schedule_rows
from piper.schedules.preview import preview_schedule
from piper.schedules.rows import parse_rows, row_violations, stages_by_rank
from piper.schedules.synthesis import Pipeline
from piper.schedules.synthesis.equal import equal_pipeline
from piper.schedules.synthesis.find import synthesize
from piper.schedules.synthesis.library import known_schedules
from piper.schedules.synthesis.timing import Timer, order_of_rows
from tests.piper.schedules.oracles import parse

QUICK = 300_000
"""Passes that a search of a test times."""


def times_of(pipeline: Pipeline, rows: Sequence[Sequence[str]]) -> dict[str, tuple[int, int]]:
    """Return start and end of every pass, found by running the rows over and over until nothing moves."""
    cost = {"F": pipeline.forward_ns, "BI": pipeline.inputs_ns, "BW": pipeline.weights_ns}
    last = pipeline.num_stages - 1
    times: dict[str, tuple[int, int]] = {}
    moved = True
    while moved:
        moved = False
        for row in rows:
            free = 0
            for code in row:
                s, kind, m = parse(code)
                if code not in times:
                    needs = {
                        "F": [(f"{s - 1}F{m}", pipeline.hop_ns[s - 1])] if s else [],
                        "BI": [(f"{s + 1}BI{m}", pipeline.hop_ns[s])] if s < last else [(f"{s}F{m}", 0)],
                        "BW": [(f"{s}BI{m}", 0)],
                    }[kind]
                    if any(need not in times for need, _ in needs):
                        break
                    start = max([free, *(times[need][1] + hop for need, hop in needs)])
                    times[code] = (start, start + cost[kind][s])
                    moved = True
                free = times[code][1]
    return times


def peak_of(pipeline: Pipeline, rank: int, times: dict[str, tuple[int, int]]) -> int:
    """Return the most bytes of a rank: F takes them at its start, BI and BW give them back at their end."""
    changes = []
    for code, (start, end) in times.items():
        s, kind, _ = parse(code)
        if s not in pipeline.stages[rank]:
            continue
        held, left = pipeline.held_bytes[s], pipeline.left_bytes[s]
        changes.append({"F": (start, 1, held), "BI": (end, 0, left - held), "BW": (end, 0, -left)}[kind])
    used = most = 0
    for _, _, change in sorted(changes):
        used += change
        most = max(most, used)
    return most


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    """Draw a pipeline of unequal stages with caps between one microbatch and more than all."""
    ranks, layout, m = draw(st.integers(1, 4)), draw(st.sampled_from(["loop", "v"])), draw(st.integers(1, 7))
    per_rank = 2 if layout == "v" else draw(st.integers(1, 3))
    count = ranks * per_rank
    numbers = st.integers(1, 12)
    listed = st.lists(numbers, min_size=count, max_size=count).map(tuple)
    held = draw(listed)
    left = tuple(draw(st.integers(0, 2 * size)) for size in held)
    stages = stages_by_rank(ranks, per_rank, layout=layout)
    spare = st.integers(0, 40)
    return Pipeline(
        stages=stages,
        num_microbatches=m,
        forward_ns=draw(listed),
        inputs_ns=draw(listed),
        weights_ns=draw(listed),
        hop_ns=tuple(draw(st.lists(st.integers(0, 4), min_size=count - 1, max_size=count - 1))),
        held_bytes=held,
        left_bytes=left,
        cap_bytes=tuple(
            sum(held[s] for s in own) + max(0, *(left[s] - held[s] for s in own)) + draw(spare)
            for own in stages
        ),
    )


@given(pipeline=pipelines())
@settings(max_examples=20, deadline=None)
def test_an_order_is_legal_keeps_to_the_caps_and_takes_no_less_than_the_bound(pipeline):
    found = synthesize(pipeline, passes_timed=QUICK)
    rows = parse_rows(found.rows, where="found")
    assert not row_violations(rows, stages=pipeline.stages, num_microbatches=pipeline.num_microbatches)
    times = times_of(pipeline, found.rows)
    assert max(end for _, end in times.values()) == found.makespan_ns >= pipeline.bound_ns == found.bound_ns
    peaks = tuple(peak_of(pipeline, rank, times) for rank in range(len(pipeline.stages)))
    assert peaks == found.peak_bytes
    assert all(peak <= cap for peak, cap in zip(peaks, pipeline.cap_bytes, strict=True))


@given(pipeline=pipelines())
@settings(max_examples=12, deadline=None)
def test_no_known_schedule_that_fits_is_better_and_none_is_below_the_bound(pipeline):
    found = synthesize(pipeline, passes_timed=QUICK)
    timer = Timer(pipeline=pipeline)
    for known in known_schedules(pipeline):
        (makespan, _), _, peaks = timer.replay(order_of_rows(pipeline, known.rows))
        if all(peak <= cap for peak, cap in zip(peaks, pipeline.cap_bytes, strict=True)):
            assert pipeline.bound_ns <= found.makespan_ns <= makespan, known.name


def test_a_pipeline_gives_the_same_order_each_time():
    pipeline = equal_pipeline("v", (4, 12, 2), costs=parse_costs("F=10,BI=13,BW=8,comm=1"), memory_cap=None)
    assert synthesize(pipeline) == synthesize(pipeline)


TEN = parse_costs("F=10,BI=10,BW=10,comm=1")


def test_at_the_memory_of_1f1b_sixteen_ranks_are_within_two_percent_of_the_bound():
    """The loose bound: the last rank waits for the first forward, then runs all its passes."""
    found = synthesize(equal_pipeline("loop", (16, 128, 1), costs=TEN, memory_cap=None))
    assert found.makespan_ns <= 1.02 * (15 * 11 + 128 * 30)
    twice = synthesize(equal_pipeline("loop", (16, 128, 1), costs=TEN, memory_cap=32))
    assert twice.makespan_ns <= 1.005 * (15 * 11 + 128 * 30)


def test_in_a_v_nothing_is_left_between_the_order_and_the_bound_at_the_memory_of_1f1b():
    half = parse_costs("F=5,BI=5,BW=5,comm=1")
    found = synthesize(equal_pipeline("v", (16, 128, 2), costs=half, memory_cap=None))
    zbv = preview_schedule(
        "zbv", num_pipeline_ranks=16, num_microbatches=128, virtual_stages_per_rank=2, costs=half
    )
    assert found.makespan_ns == found.bound_ns == 3960 < zbv.makespan


def test_with_a_heavy_head_and_dear_input_gradients_an_order_beats_the_v_schedules_at_their_bytes():
    """A V with a vocabulary in its last stage, as in a model whose head costs as much as two layers."""
    ranks, m = 8, 32
    pipeline = unequal_v(ranks, m)
    timer, best = Timer(pipeline=pipeline), []
    for known in known_schedules(pipeline):
        if known.name in {"zbv", "v_half", "dualpipe_v"}:
            (makespan, _), _, peaks = timer.replay(order_of_rows(pipeline, known.rows))
            best.append((makespan, max(peaks)))
    assert len(best) == 3
    for makespan, peak in best:
        found = synthesize(unequal_v(ranks, m, cap=int(peak)))
        assert found.makespan_ns < makespan
        assert max(found.peak_bytes) <= peak


def unequal_v(ranks: int, m: int, *, cap: int = 10**6) -> Pipeline:
    """Return a V whose input gradients cost more than forwards, whose last stage has the head."""
    stages = stages_by_rank(ranks, 2, layout="v")
    count = 2 * ranks
    head = [0] * (count - 1) + [1]
    return Pipeline(
        stages=stages,
        num_microbatches=m,
        forward_ns=tuple(100 + 60 * h for h in head),
        inputs_ns=tuple(130 + 60 * h for h in head),
        weights_ns=tuple(80 + 60 * h for h in head),
        hop_ns=tuple(0 if s == ranks - 1 else 4 for s in range(count - 1)),
        held_bytes=(100,) * count,
        left_bytes=(60,) * count,
        cap_bytes=(cap,) * ranks,
    )


def test_a_cap_below_one_microbatch_is_refused_with_the_figures():
    with pytest.raises(StrategyError) as caught:
        schedule_rows(
            "synthesized", num_pipeline_ranks=4, num_microbatches=8, memory_cap=parse_costs("F=1/2")["F"]
        )
    assert "needs one microbatch in flight, the memory cap is 1/2" in caught.value.rule
    with pytest.raises(ValueError, match="holds 200 bytes on pipeline rank 0, its memory cap is 150"):
        unequal_v(2, 4, cap=150)


def test_under_a_cap_of_one_microbatch_the_ranks_work_one_after_the_other():
    found = schedule_rows(
        "synthesized", num_pipeline_ranks=2, num_microbatches=2, memory_cap=parse_costs()["F"]
    )
    assert [slot[0].code for slot in found[0]] == ["0F0", "0BI0", "0BW0", "0F1", "0BI1", "0BW1"]

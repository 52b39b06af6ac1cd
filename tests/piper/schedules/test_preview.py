"""A schedule without a model: exact times, bubbles and counts, from the same simulator as everything else."""

import json
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper.errors import StrategyError
from piper.schedules import SCHEDULES, copies_of, find_schedule, parse_costs, stages_of
from piper.schedules.gantt import draw_gantt
from piper.schedules.minimal_plan import preview_plan
from piper.schedules.preview import Preview, preview_rows, preview_schedule
from piper.schedules.rows import parse_rows, show_rows
from simulator.plan.check import check_plan
from tests.piper.schedules.oracles import dataflow_times, rows_or_none

GRID = [(p, m) for p in (2, 4, 8) for m in range(p, 4 * p + 1)]
KEYS = [
    "rows",
    "makespan",
    "longest_rank_span",
    "bubble_fraction",
    "bubble_fraction_span",
    "in_flight",
    "peak_in_flight",
]


def preview(name: str, p: int, m: int, costs: str = "", *, v: int = 1) -> Preview:
    return preview_schedule(
        name,
        num_pipeline_ranks=p,
        num_microbatches=m,
        virtual_stages_per_rank=v,
        costs=parse_costs(costs),
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_is_exactly_p_minus_1_over_m_plus_p_minus_1(name):
    for p, m in GRID:
        found = preview(name, p, m)
        assert found.makespan == 3 * (m + p - 1)
        bubble = found.bubble_fraction
        assert bubble.numerator * (m + p - 1) == (p - 1) * bubble.denominator


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_does_not_depend_on_how_long_passes_are(name):
    for p, m in [(2, 3), (4, 4), (4, 11), (8, 8)]:
        found = preview(name, p, m, "F=0.7,BI=1.1,BW=1/3")
        assert found.bubble_fraction == Fraction(p - 1, m + p - 1)


def test_gpipe_holds_all_microbatches_and_1f1b_no_more_than_the_ranks_behind():
    for p, m in [(2, 2), (4, 3), (4, 4), (4, 9), (8, 16)]:
        assert preview("gpipe", p, m).in_flight == (m,) * p
        assert preview("1f1b", p, m).in_flight == tuple(min(m, p - r) for r in range(p))


costs_of_passes = st.fractions(min_value=Fraction(1, 8), max_value=5, max_denominator=12)


@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    p=st.integers(1, 5),
    m=st.integers(1, 7),
    v=st.integers(1, 2),
    passes=st.tuples(costs_of_passes, costs_of_passes, costs_of_passes),
    comm=st.just(Fraction(0)) | st.fractions(min_value=0, max_value=9, max_denominator=12),
)
@settings(max_examples=50, deadline=None)
def test_times_are_those_of_the_dataflow_whatever_passes_and_latency_cost(*, name, p, m, v, passes, comm):
    text = f"F={passes[0]},BI={passes[1]},BW={passes[2]},comm={comm}"
    if rows_or_none(name, p, m, v) is not None:
        assert_dataflow(preview(name, p, m, text, v=v))


def assert_dataflow(found: Preview) -> None:
    times = dataflow_times(
        show_rows(found.rows), found.costs, num_stages=sum(map(len, found.stages)) // found.copies
    )
    for row in found.spans:
        for span in row:
            for task in span.tasks:
                assert (span.start, span.end) == times[task.code], task.code


V_ROWS = [
    ["0F0", "0F1", "3F0", "3BI0", "3F1", "0F2", "3BI1", "3BW0", "0B0", "3F2", "3B2", "3BW1", "0B1", "0B2"],
    ["1F0", "2F0", "1F1", "2F1", "2B0", "1B0", "1F2", "2F2", "2BI1", "1B1", "2BW1", "2B2", "1B2"],
]
V_STAGES = ((0, 3), (1, 2))


@pytest.mark.parametrize("costs", ["", "F=1,BI=2,BW=0.5,comm=0.25", "comm=7"])
def test_split_backwards_and_several_stages_on_a_rank_follow_the_dataflow(costs):
    rows = parse_rows(V_ROWS, where="test")
    found = preview_rows(rows, stages=V_STAGES, costs=parse_costs(costs))
    assert_dataflow(found)
    assert all(held.denominator in {1, 2} for held in found.in_flight)


def test_a_stage_counts_its_share_of_the_rank_in_flight():
    rows = parse_rows([["0F0", "1F0", "1BI0", "0BI0", "1BW0", "0BW0"]], where="test")
    found = preview_rows(rows, stages=((0, 1),), costs=parse_costs())
    assert found.in_flight == (1,)
    rows = parse_rows([["0F0", "1F0", "1B0", "0F1", "1F1", "1B1", "0B1", "0B0"]], where="test")
    assert preview_rows(rows, stages=((0, 1),), costs=parse_costs()).in_flight == (Fraction(3, 2),)


@pytest.mark.parametrize("overlapped", ["F+BI+BW", "2.25", "0.5"])
@pytest.mark.parametrize("comm", ["0", "1.5"])
def test_an_overlapped_slot_starts_together_and_lasts_its_own_cost(overlapped, comm):
    raw = [["0F0", "0F1", ["0F2", "0B0"], ["0B1", "0F3"], "0B2", "0B3"],
           ["1F0", ["1F1", "1B0"], ["1F2", "1B1"], "1F3", "1B2", "1B3"]]  # fmt: skip
    rows = parse_rows(raw, where="test")
    costs = parse_costs(f"FB={overlapped},comm={comm}")
    found = preview_rows(rows, stages=((0,), (1,)), costs=costs)
    assert_dataflow(found)
    slot = found.spans[1][1]
    assert slot.end - slot.start == costs["FB"]
    assert sum(span.end - span.start for span in found.spans[0]) == 4 + 2 * costs["FB"] + 2


def test_other_passes_cannot_overlap():
    rows = parse_rows([[["0F0", "0F1"], "0B0", "0B1"]], where="test")
    with pytest.raises(StrategyError) as caught:
        preview_rows(rows, stages=((0,),), costs=parse_costs(), where="my.py:f")
    assert caught.value.where == "my.py:f: pipeline rank 0 slot 0"
    assert "one F and one B" in caught.value.rule
    assert caught.value.fix


def test_costs_that_have_too_many_digits_together_are_refused():
    with pytest.raises(StrategyError) as caught:
        preview("1f1b", 2, 2, "F=1.0000001,BI=1.00000011,comm=1/10007")
    assert "10^12" in caught.value.rule
    assert "fewer digits" in caught.value.fix


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("comm", [0, 3])
def test_the_plan_of_a_schedule_is_legal(name, comm):
    durations = {"F": 1, "B": 2, "BI": 1, "BW": 1, "FB": 3, "comm": comm}
    for p, m, v in [(1, 1, 1), (2, 3, 1), (4, 6, 1), (2, 4, 2), (4, 8, 2)]:
        rows = rows_or_none(name, p, m, v)
        if rows is not None:
            stages = stages_of(name, num_pipeline_ranks=p, virtual_stages_per_rank=v)
            copies = copies_of(find_schedule(name))
            plan = preview_plan(rows, stages=stages, durations_ns=durations, copies=copies)
            assert check_plan(plan) == []
    v_plan = preview_plan(parse_rows(V_ROWS, where="test"), stages=V_STAGES, durations_ns=durations)
    assert check_plan(v_plan) == []


def test_the_json_object_has_the_keys_of_the_contract_and_exact_numbers():
    found = json.loads(json.dumps(preview("1f1b", 2, 4).to_json()))
    assert list(found) == KEYS
    assert found["rows"][1] == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1F3", "1B3"]
    assert found["makespan"] == found["longest_rank_span"] == 15
    assert found["bubble_fraction"] == found["bubble_fraction_span"] == 0.2
    assert found["in_flight"] == [2, 1]
    assert found["peak_in_flight"] == 2


def test_the_span_bubble_counts_from_the_first_start_of_the_longest_rank():
    found = preview_rows(
        parse_rows([["0F0", "0B0"], ["1F0", "1B0"]], where="test"),
        stages=((0,), (1,)),
        costs=parse_costs("comm=1"),
    )
    assert found.makespan == 8
    assert found.longest_rank_span == 8
    assert found.bubble_fraction == 1 - Fraction(6, 16)
    assert found.bubble_fraction_span == 1 - Fraction(3, 8)


def test_the_gantt_shows_every_pass_in_its_place():
    text = draw_gantt(preview("1f1b", 2, 3), width=80)
    assert text.splitlines() == [
        "rank 0   |F0|F1......|B0   |F2|B1   ...|B2   ",
        "rank 1   ...|F0|B0   |F1|B1   |F2|B2   ......",
        "         0 .. 12, one character = 0.333333",
    ]


def test_the_gantt_keeps_its_width_when_names_no_longer_fit():
    lines = draw_gantt(preview("gpipe", 4, 64), width=80).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("rank 0   ")
    assert "F" in lines[0]
    assert "B" in lines[0]
    assert lines[3][9] == "."


def test_the_gantt_names_stages_and_both_passes_of_an_overlapped_slot():
    rows = parse_rows([["0F0", "1F0", ["0F1", "1B0"], "1F1", "1B1", "0B0", "0B1"]], where="test")
    text = draw_gantt(preview_rows(rows, stages=((0, 1),), costs=parse_costs()))
    assert "|0F0" in text
    assert "|0F1+1B0" in text

"""Zero bubble under a memory cap: never over it, never worse than by hand, optimal where that is known."""

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper.errors import StrategyError
from piper.schedules import parse_costs, schedule_rows, show_rows
from piper.schedules.automatic import automatic_rows
from piper.schedules.preview import preview_rows, preview_schedule
from piper.schedules.rows import parse_rows
from tests.piper.schedules.oracles import dataflow_times, parse


def rate(name: str, p: int, m: int, costs: str) -> Fraction:
    found = preview_schedule(name, num_pipeline_ranks=p, num_microbatches=m, costs=parse_costs(costs))
    return found.bubble_fraction_span


def test_with_equal_passes_one_p_is_a_third_of_1f1b_and_two_p_is_nothing():
    """The zero-bubble authors' README: ZB1P B/3, ZB2P 0, where B is the bubble of 1F1B."""
    for p, m in [(2, 4), (4, 8), (4, 9), (8, 16), (8, 33)]:
        for name, bubble in [("1f1b", 3 * (p - 1)), ("zb_1p", p - 1), ("zb_2p", 0)]:
            found = preview_schedule(name, num_pipeline_ranks=p, num_microbatches=m)
            assert found.longest_rank_span == 3 * m + bubble, name


costs_of_passes = st.builds(
    "F={},BI={},BW={},comm={}".format,
    st.integers(1, 20), st.integers(1, 20), st.integers(1, 20), st.sampled_from([0, 1, 3]),
)  # fmt: skip


@given(p=st.integers(1, 6), m=st.integers(1, 20), costs=costs_of_passes)
@settings(max_examples=60, deadline=None)
def test_one_p_is_never_worse_than_zb_h1_and_two_p_never_worse_than_zb_h2(*, p, m, costs):
    assert rate("zb_1p", p, m, costs) <= rate("zb_h1", p, m, costs)
    assert rate("zb_2p", p, m, costs) <= rate("zb_h2", p, m, costs)
    assert rate("zb_2p", p, m, costs) <= rate("zb_1p", p, m, costs)


@given(
    p=st.integers(1, 5),
    m=st.integers(1, 16),
    kept=st.sampled_from(["0", "1/3", "0.7"]),
    costs=costs_of_passes,
)
@settings(max_examples=60, deadline=None)
def test_where_bw_keeps_less_than_the_whole_the_cap_is_kept_and_no_span_is_below_the_least(
    *, p, m, kept, costs
):
    exact = parse_costs(f"{costs},kept={kept}")
    strict = preview_schedule("zb_2p", num_pipeline_ranks=p, num_microbatches=m, costs=parse_costs(costs))
    found = preview_schedule("zb_2p", num_pipeline_ranks=p, num_microbatches=m, costs=exact)
    assert max(found.in_flight) <= 2 * p
    way = (p - 1) * (exact["F"] + exact["BI"] + 2 * exact["comm"])
    waiting = m - 1 if kept == "0" else min(m - 1, (min(m, 2 * p) - 1) / exact["kept"] // 1)
    least = max(0, way - min((min(m, 2 * p) - 1) * exact["F"], waiting * exact["BW"]))
    assert found.longest_rank_span >= m * (exact["F"] + exact["BI"] + exact["BW"]) + least
    assert max(strict.in_flight) <= 2 * p


@given(p=st.integers(1, 6), m=st.integers(1, 20), cap=st.integers(1, 14), costs=costs_of_passes)
@settings(max_examples=60, deadline=None)
def test_any_cap_of_one_or_more_is_kept_on_every_rank_of_rows_that_can_run(*, p, m, cap, costs):
    exact = parse_costs(costs)
    raw = automatic_rows(num_pipeline_ranks=p, num_microbatches=m, costs=exact, cap=cap)
    assert raw == automatic_rows(num_pipeline_ranks=p, num_microbatches=m, costs=exact, cap=cap)
    times = dataflow_times(raw, exact, num_stages=p)
    assert len(times) == 3 * p * m
    for row in raw:
        held = 0
        for code in row:
            held += {"F": 1, "BI": 0, "BW": -1}[parse(code)[1]]
            assert held <= cap


@pytest.mark.parametrize("name", ["zb_1p", "zb_2p"])
def test_a_memory_cap_below_the_schedules_own_is_kept_and_a_higher_one_changes_nothing(name):
    counts = {"num_pipeline_ranks": 4, "num_microbatches": 9}
    free = preview_schedule(name, **counts)
    spans = []
    for cap in ("1", "2", "5/2", "3", "4", "20"):
        found = preview_schedule(name, **counts, memory_cap=Fraction(cap))
        assert max(found.in_flight) <= Fraction(cap)
        spans.append(found.longest_rank_span)
    assert spans == sorted(spans, reverse=True)
    assert spans[1] == spans[2]
    assert found.rows == free.rows


def test_less_than_one_microbatch_of_memory_is_refused():
    with pytest.raises(StrategyError, match="needs one microbatch in flight, the memory cap is 0"):
        schedule_rows("zb_1p", num_pipeline_ranks=2, num_microbatches=2, memory_cap=Fraction(1, 2))


def test_a_single_rank_or_microbatch_runs_without_a_choice():
    assert show_rows(schedule_rows("zb_2p", num_pipeline_ranks=1, num_microbatches=1)) == [
        ["0F0", "0BI0", "0BW0"]
    ]
    assert rate("zb_1p", 1, 7, "") == 0
    assert show_rows(schedule_rows("zb_1p", num_pipeline_ranks=3, num_microbatches=1)) == [
        [f"{rank}F0", f"{rank}BI0", f"{rank}BW0"] for rank in range(3)
    ]


def orders(m: int, cap: int) -> list[tuple[str, ...]]:
    """Return every order of F, BI and BW of a rank, microbatches in turn, at most `cap` in flight."""
    found, open_ends = [], [((), 0, 0, 0)]
    while open_ends:
        row, f, bi, bw = open_ends.pop()
        if bw == m:
            found.append(row)
        if f < m and f - bw < cap:
            open_ends.append(((*row, f"F{f}"), f + 1, bi, bw))
        if bi < f:
            open_ends.append(((*row, f"BI{bi}"), f, bi + 1, bw))
        if bw < bi:
            open_ends.append(((*row, f"BW{bw}"), f, bi, bw + 1))
    return found


def least_span_of_all_orders(p: int, m: int, cap: int, costs) -> Fraction:
    spans = []
    for choice in product(orders(m, cap), repeat=p):
        rows = [[f"{rank}{code}" for code in row] for rank, row in enumerate(choice)]
        try:
            times = dataflow_times(rows, costs, num_stages=p)
        except AssertionError:
            continue
        spans.append(max(times[row[-1]][1] - times[row[0]][0] for row in rows))
    return min(spans)


@pytest.mark.parametrize(
    "costs", ["", "F=3,BI=2,BW=1", "F=1,BI=2,BW=3", "F=2,BI=4,BW=2,comm=1", "F=10,BI=9,BW=5,comm=3"]
)
@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 2), (2, 3), (3, 2)])
def test_no_order_of_all_is_shorter_on_few_ranks_and_microbatches(p, m, costs):
    exact = parse_costs(costs)
    for cap in range(1, m + 1):
        raw = automatic_rows(num_pipeline_ranks=p, num_microbatches=m, costs=exact, cap=cap)
        found = preview_rows(
            parse_rows(raw, where="test"), stages=tuple((rank,) for rank in range(p)), costs=exact
        )
        assert found.longest_rank_span == least_span_of_all_orders(p, m, cap, exact), cap

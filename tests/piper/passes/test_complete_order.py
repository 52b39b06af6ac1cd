"""Orders of some ranks or tasks are completed; what they state is kept, or refused with a cycle."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper.errors import StrategyError
from piper.graph import Graph
from piper.graph.graph import Rows
from piper.passes.complete_order import CompleteOrder
from piper.schedules import schedule_rows, show_rows
from piper.schedules.rows import row_violations
from tests.facts import TWO, rows
from tests.graphs import after, placed, transformer


def graph_of(*texts: str, stages: int = 2, microbatches: int = 2) -> Graph:
    """Return a graph of 1, 2 or 4 stages, one on each pipeline rank, with rows of tasks."""
    cut = {1: [0] * 9, 2: TWO, 4: [0, 0, 1, 1, 2, 2, 3, 3, 3]}[stages]
    return placed(
        transformer(layers=1), stages=cut, axes={"pp": stages}, microbatches=microbatches,
        rows=rows(*texts) if texts else (), schedule="custom" if texts else "",
    )  # fmt: skip


def completed(*texts: str, stages: int = 2, microbatches: int = 2) -> list[list[str | list[str]]]:
    return show_rows(CompleteOrder().apply(graph_of(*texts, stages=stages, microbatches=microbatches)).rows)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 8])
def test_without_any_order_ranks_with_one_stage_each_get_1f1b(stages: int, microbatches: int) -> None:
    want = schedule_rows("1f1b", num_pipeline_ranks=stages, num_microbatches=microbatches)
    assert completed(stages=stages, microbatches=microbatches) == show_rows(want)


def test_a_rank_without_a_row_follows_the_ranks_that_have_one() -> None:
    assert completed("0F0 0F1 0B1 0B0", "") == [["0F0", "0F1", "0B1", "0B0"], ["1F0", "1B0", "1F1", "1B1"]]


def test_more_forwards_run_where_a_stated_row_needs_them_first() -> None:
    """The second rank wants all forwards before a backward; the first one by itself holds two."""
    listed = "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"
    found = completed("", listed, microbatches=4)
    assert found == [["0F0", "0F1", "0F2", "0F3", "0B0", "0B1", "0B2", "0B3"], listed.split()]


def test_tasks_that_a_row_leaves_out_find_their_place_between_the_stated_ones() -> None:
    assert completed("0F1 0F0", "1B1 1B0") == [["0F1", "0F0", "0B1", "0B0"], ["1F1", "1B1", "1F0", "1B0"]]


def test_a_backward_in_halves_stays_in_halves_and_the_others_are_whole() -> None:
    first, second = completed("0BI0 0BW0", "")
    assert sorted(first) == ["0B1", "0BI0", "0BW0", "0F0", "0F1"]
    assert first.index("0F0") < first.index("0BI0") < first.index("0BW0")
    assert second == ["1F0", "1B0", "1F1", "1B1"]


def test_a_whole_order_and_a_named_schedule_are_left_alone() -> None:
    whole = graph_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert CompleteOrder().apply(whole) is whole
    named = replace(graph_of("0F0", "1F0"), schedule="1f1b")
    assert CompleteOrder().apply(named) is named
    with pytest.raises(StrategyError, match="is missing"):
        after(named, "check_order")


def test_rows_that_contradict_the_data_are_refused_with_the_shortest_cycle() -> None:
    with pytest.raises(StrategyError) as caught:
        completed("0B0 0F0", "")
    assert "0B0 of rank 0 -> 0F0 of rank 0 -> 0B0 of rank 0 (each waits for the next)" in caught.value.rule
    with pytest.raises(StrategyError) as caught:
        completed("0B0 0F1", "1F1 1B0")
    chain = "0B0 of rank 0 -> 1B0 of rank 1 -> 1F1 of rank 1 -> 0F1 of rank 0 -> 0B0 of rank 0"
    assert chain in caught.value.rule
    assert caught.value.where == "order of pipeline rank 0"
    assert "leave one out" in caught.value.fix


def kept(part: Rows, whole: Rows) -> bool:
    """Return whether every row lists what its part lists, in the same order."""
    return all(
        [slot for slot in row if slot in listed] == list(listed)
        for listed, row in zip(part, whole, strict=True)
    )


@given(
    data=st.data(), microbatches=st.integers(1, 5), name=st.sampled_from(["1f1b", "gpipe", "zb_h1", "zb_h2"])
)
@settings(max_examples=60, deadline=None)
def test_any_part_of_an_order_that_can_run_is_completed_to_one_that_can(
    data: st.DataObject, microbatches: int, name: str
) -> None:
    whole = schedule_rows(name, num_pipeline_ranks=4, num_microbatches=microbatches)
    halves = "zb" in name
    left_out = data.draw(
        st.sets(st.tuples(st.integers(0, 3), st.integers(0, microbatches - 1), st.booleans()), max_size=12)
    )
    part = tuple(
        tuple(
            slot
            for slot in row
            if not any((t.stage, t.microbatch, t.kind.name == "F") in left_out for t in slot)
        )
        for row in whole
    )
    graph = graph_of(stages=4, microbatches=microbatches)
    found = CompleteOrder().apply(replace(graph, rows=part, schedule="custom")).rows
    stages = tuple((rank,) for rank in range(4))
    assert row_violations(found, stages=stages, num_microbatches=microbatches) == ()
    assert kept(part, found)
    assert halves or {t.kind.name for row in found for slot in row for t in slot} <= {"F", "B"}
    assert found == CompleteOrder().apply(replace(graph, rows=part, schedule="custom")).rows

"""Another order of a compiled job costs its emission only, and gives the plan that a compilation gives."""

from __future__ import annotations

import pytest

from piper.compiler.compile import CompiledGraph
from piper.errors import StrategyError
from simulator.plan.codec import plan_to_bytes
from tests.facts import MIXED, SPLIT, graph_of, rows
from tests.graphs import after

OTHER = rows("0F0 0BI0 0F1 0BW0 0BI1 0BW1", "1F0 1BI0 1BW0 1F1 1BI1 1BW1")


def compiled_graph(name: str, **changes: object) -> CompiledGraph:
    graph = after(graph_of(name, **changes), "check_order")
    return CompiledGraph(graph=graph, directives=(), strategy=name)


@pytest.mark.parametrize("other", [OTHER, MIXED])
def test_the_plan_equals_that_of_a_compilation(other: object) -> None:
    once = compiled_graph("tp_split", rows=SPLIT)
    assert once.plan().schedule == ""
    again = once.reordered(other, schedule="mine", directives=())  # type: ignore[arg-type]
    alone = compiled_graph("tp_split", rows=other).reordered(other, schedule="mine", directives=())  # type: ignore[arg-type]
    for one, two in zip(again.device_plans, alone.device_plans, strict=True):
        assert one.codes() == two.codes()
    assert len(plan_to_bytes(again)) > 0


def test_rows_that_lack_a_task_are_refused() -> None:
    with pytest.raises(StrategyError, match="is missing from the order"):
        compiled_graph("zero0").reordered(rows("0F0", "1F0"), schedule="mine", directives=())


def test_rows_that_split_what_was_whole_need_a_compilation() -> None:
    with pytest.raises(StrategyError, match="splits a backward that was whole"):
        compiled_graph("zero0").reordered(SPLIT, schedule="mine", directives=())

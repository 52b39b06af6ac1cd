"""Rows may order parts of stages in any order that the data allow: the plan is legal, and runs to its end."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from piper.compiler.compile import CompiledGraph, emit_plan
from piper.errors import StrategyError
from piper.graph import Graph
from piper.graph.graph import Rows
from simulator import simulate
from simulator.engines import ENGINES
from simulator.plan import NONE, Plan
from simulator.plan.check import check_plan
from simulator.plan.codec import bytes_to_plan, plan_to_bytes
from tests.behaviour.test_random_facts import ByFlops
from tests.facts import CASES, graph_of
from tests.graphs import after
from tests.random_facts import random_graph
from tests.random_parts import random_rows, with_random_parts

ONE_HOME = [name for name in CASES if "two_directions" not in name]
"""Rows of filters have each stage on one pipeline rank."""


def plan_of(graph: Graph) -> Plan:
    return emit_plan(after(graph, "check_order"), [], strategy="parts")


def check(plan: Plan) -> None:
    assert [str(violation) for violation in check_plan(plan)] == []
    for device in plan.device_plans:
        assert len(set(device.codes())) == len(device.codes())
    data = plan_to_bytes(plan)
    assert plan_to_bytes(bytes_to_plan(data)) == data
    found = [simulate(plan, ByFlops(), steps=2, engine=engine).rows() for engine in ENGINES]
    assert found[0] != []
    assert all(rows == found[0] for rows in found)


def without_some(rows: Rows, choose: random.Random) -> Rows:
    """Return rows without a third of their tasks; halves stay together."""
    lost = {(t.stage, t.microbatch) for row in rows for slot in row for t in slot if choose.random() < 0.2}
    kept = (
        (
            tuple(t for t in slot if (t.stage, t.microbatch) not in lost or choose.random() < 0.4)
            for slot in row
        )
        for row in rows
    )
    return tuple(tuple(slot for slot in row if slot) for row in kept)


@pytest.mark.parametrize("name", ONE_HOME)
def test_whatever_is_cut_and_exchanged_parts_may_interleave(name: str) -> None:
    for seed in range(2):
        check(plan_of(with_random_parts(graph_of(name), random.Random(f"{name} {seed}"))))


@pytest.mark.parametrize("seed", range(40))
def test_random_facts_and_random_parts_make_a_legal_plan_that_ends(seed: int) -> None:
    graph = random_graph(seed)
    if len(set(graph.pipeline_rank_of_stage.values())) == graph.num_pipeline_ranks:
        check(plan_of(with_random_parts(graph, random.Random(seed))))


@pytest.mark.parametrize("seed", range(20))
def test_what_rows_with_parts_leave_out_is_filled_in(seed: int) -> None:
    choose = random.Random(seed)
    graph = with_random_parts(graph_of(choose.choice(ONE_HOME)), choose)
    whole = plan_of(graph)
    partial = plan_of(replace(graph, rows=without_some(graph.rows, choose)))
    check(partial)
    for one, other in zip(whole.device_plans, partial.device_plans, strict=True):
        assert one.stages == other.stages


@pytest.mark.parametrize("seed", range(10))
def test_another_order_of_the_same_parts_needs_no_compilation(seed: int) -> None:
    choose = random.Random(seed)
    graph = with_random_parts(graph_of("tp_split"), choose, halves=1.0)
    once = CompiledGraph(graph=after(graph, "check_order"), directives=(), strategy="parts")
    other = random_rows(graph, choose)
    again = once.reordered(other, schedule="custom", directives=())
    check(again)
    alone = plan_of(replace(graph, rows=other))
    assert [sorted(d.codes()) for d in again.device_plans] == [sorted(d.codes()) for d in alone.device_plans]


def test_an_order_that_divides_stages_otherwise_needs_a_compilation() -> None:
    once = CompiledGraph(graph=after(graph_of("zero0"), "check_order"), directives=(), strategy="parts")
    rows = tuple(tuple(map(tuple, row)) for row in once.graph.rows)
    divided = ((replace(rows[0][0][0], part=2),), *rows[0])
    with pytest.raises(StrategyError, match=r"0F0/2.*is no part of its stage\nfix: compile the strategy"):
        once.reordered((divided, *rows[1:]), schedule="custom", directives=())


def test_stages_that_no_row_divides_run_as_one_task() -> None:
    plan = plan_of(graph_of("zero0"))
    parts = [device.tasks.part[device.tasks.first_segment != NONE] for device in plan.device_plans]
    assert all((part == NONE).all() for part in parts)

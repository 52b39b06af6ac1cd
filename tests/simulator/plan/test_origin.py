"""Violations name the directives that they come from; the least memory is below the simulated peak."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cost_models import cluster_cost_model, load_cluster
from piper.directives import DIRECTIVES
from simulator import simulate
from simulator.memory import peak_of
from simulator.plan import IndexLists, Plan, TaskKind
from simulator.plan.check import check_plan, least_memory_bytes
from simulator.plan.checks.origin import ORIGINS
from tests.jobs import compiled

STRATEGIES = ["pp=1,dp=1", "pp=2,dp=2,zero=1", "pp=4,dp=1,schedule=gpipe", "pp=2,dp=1,recompute=full"]


def with_places(plan: Plan) -> Plan:
    places = tuple(f"strategy.json:{line}" for line in range(2, 2 + len(plan.directives)))
    return replace(plan, directive_places=places)


def without(plan: Plan, rank: int, kind: TaskKind) -> Plan:
    """Leave out the last task of a kind, and every reference to it."""
    device = plan.device_plans[rank]
    gone = int(np.flatnonzero(device.tasks.kind == kind)[-1])
    number = {task: task - (task > gone) for task in range(len(device.tasks)) if task != gone}
    columns = {}
    for name in device.tasks.__dataclass_fields__:
        column = getattr(device.tasks, name)
        if isinstance(column, IndexLists):
            rows = [row for task, row in enumerate(column.to_rows()) if task != gone]
            if name.endswith("waits"):
                rows = [[number[task] for task in row if task != gone] for row in rows]
            columns[name] = IndexLists.from_rows(rows)
        else:
            columns[name] = np.delete(column, gone)
    changed = replace(device, tasks=replace(device.tasks, **columns))
    plans = tuple(changed if d is device else d for d in plan.device_plans)
    return replace(plan, device_plans=plans)


def test_a_lost_reduction_comes_from_the_replicate_directive_and_its_line() -> None:
    plan = with_places(compiled("pp=2,dp=2,zero=1"))
    line = 2 + [entry["op"] for entry in plan.directives].index("replicate")
    broken = check_plan(without(plan, 1, TaskKind.REDUCE_SCATTER))
    lost = next(violation for violation in broken if violation.rule == "never-reduced")
    assert lost.directives == (f"replicate (strategy.json:{line})",)
    assert str(lost).endswith(f"[replicate (strategy.json:{line})]")


def test_a_lost_forward_comes_from_the_order() -> None:
    plan = with_places(compiled("pp=2,dp=1"))
    broken = check_plan(without(plan, 0, TaskKind.F))
    lost = next(violation for violation in broken if violation.rule == "forward-count")
    assert [name.partition(" ")[0] for name in lost.directives] == ["order"]


def test_without_places_the_directive_alone_is_named() -> None:
    plan = replace(compiled("pp=2,dp=2"), directive_places=())
    broken = check_plan(without(plan, 1, TaskKind.ALL_REDUCE))
    assert any(violation.directives == ("replicate",) for violation in broken)


def test_every_rule_has_origins_among_the_directives_of_the_language() -> None:
    known = {*DIRECTIVES}
    assert {op for ops in ORIGINS.values() for op in ops} <= known


@pytest.mark.parametrize("text", STRATEGIES)
def test_the_least_memory_is_a_lower_bound_of_the_simulated_peak(text: str) -> None:
    plan = compiled(text, global_batch=8)
    timeline = simulate(plan, cluster_cost_model(load_cluster("dgx-h100")))
    for track in timeline.tracks:
        least = least_memory_bytes(plan)[track.pipeline_rank]
        peak = peak_of(track).total_bytes
        assert plan.device_plans[track.pipeline_rank].buffers.static_bytes < least <= peak


def test_the_least_memory_grows_with_the_microbatches_in_flight() -> None:
    plans = [compiled("pp=1,dp=1,schedule=gpipe", global_batch=number) for number in (1, 8)]
    few, many = (max(least_memory_bytes(plan)) for plan in plans)
    assert many > few

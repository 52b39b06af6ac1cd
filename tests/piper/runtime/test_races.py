"""Whatever starts late, a run changes no bit; and without a wait that matters it fails or differs.

Every stream has a thread of its own here, the compute stream too, and every task sleeps before it starts
(`piper.runtime.delays`): only the plan's waits keep the order. Runs are compared by losses and gradient norms
of all steps, which follow each other without a pause.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest

from piper.errors import RunFailedError
from piper.runtime.delays import Delays, Hold
from piper.runtime.routes import first_holder
from simulator.plan import NONE, IndexLists, Plan, TaskKind
from simulator.plan.check import check_plan
from tests.piper.runtime.jobs import plan_of, train

STRATEGIES: dict[str, dict[str, object]] = {
    "dp=2,zero=3": {},
    "pp=3,schedule=gpipe": {"crossing": True},
    "pp=2,dp=2,schedule=1f1b,zero=2": {},
    "pp=2,vp=2,schedule=interleaved_1f1b": {},
    "pp=2,dp=2,schedule=zb_h1,zero=1": {"tied": True},
    "pp=3,schedule=zb_2p": {"frozen": 2},
    "pp=2,vp=2,schedule=interleaved_zb,recompute=full": {"dropout": 0.1},
    "pp=2,schedule=zbv": {"crossing": True, "tied": True},
    "pp=2,schedule=dualpipe_v": {},
    "pp=2,schedule=dualpipe,dp=2": {"tied": True},
}
HOLD_S = 0.3
"""So long a task waits to be overtaken by one that may not overtake it."""

Figures = list[tuple[float, float]]


class Wait(NamedTuple):
    pipeline_rank: int
    position: int
    waited: int
    column: str


@cache
def plan(text: str) -> Plan:
    sizes = {"global_batch": 8 if "dualpipe" in text else 4}
    return plan_of(text, clip=0.1, **sizes, **STRATEGIES[text])


def figures(plan: Plan, text: str, delays: Delays | None) -> Figures:
    outcome = train(
        plan, model=STRATEGIES[text], verify=False, reductions="ordered", delays=delays, timeout_s=20.0
    )
    return [(step["loss"], step["grad_norm"]) for step in outcome.result["steps"]]


@cache
def undisturbed(text: str) -> Figures:
    return figures(plan(text), text, None)


def waits(plan: Plan) -> Iterator[Wait]:
    """Yield every wait of a plan, in both columns."""
    for device in plan.device_plans:
        for column in ("waits", "previous_step_waits"):
            for position, row in enumerate(getattr(device.tasks, column).to_rows()):
                yield from (Wait(device.pipeline_rank, position, waited, column) for waited in row)


def without(plan: Plan, wait: Wait) -> Plan:
    device = plan.device_plans[wait.pipeline_rank]
    rows = [list(row) for row in getattr(device.tasks, wait.column).to_rows()]
    rows[wait.position].remove(wait.waited)
    tasks = replace(device.tasks, **{wait.column: IndexLists.from_rows(rows)})
    devices = list(plan.device_plans)
    devices[wait.pipeline_rank] = replace(device, tasks=tasks)
    return replace(plan, device_plans=tuple(devices))


def is_noticed(plan: Plan, text: str, wait: Wait) -> bool:
    """Return whether a run fails or differs when a wait is gone and what it waited for is late."""
    holds = tuple(
        Hold(rank, wait.waited, wait.position, wait.column == "previous_step_waits")
        for rank in plan.mesh.ranks(pp=wait.pipeline_rank)
    )
    try:
        found = figures(without(plan, wait), text, Delays(seed=0, most_s=0.0, holds=holds, hold_s=HOLD_S))
    except RunFailedError:
        return True
    return found != undisturbed(text)


def that_matter(plan: Plan) -> list[Wait]:
    """Return the waits without which the checker says that something may start too early.

    Not those that only keep memory from being used again (tensors of a CPU live as long as somebody reads
    them), nor those of a norm to which the rank adds nothing: a copy of what another rank counts.
    """
    found = {wait: {violation.rule for violation in check_plan(without(plan, wait))} for wait in waits(plan)}
    real = [wait for wait, rules in found.items() if rules - {"freed-while-read"}]
    return [wait for wait in real if not is_of_an_empty_norm(plan, wait)]


def is_of_an_empty_norm(plan: Plan, wait: Wait) -> bool:
    """Return whether a wait orders a norm and what the rank does not count in it."""
    device, first = plan.device_plans[wait.pipeline_rank], first_holder(plan)
    ends = [device.tasks.task(position) for position in (wait.position, wait.waited)]
    if not any(task.kind is TaskKind.NORM for task in ends):
        return False
    buckets = [device.buckets[task.bucket] for task in ends if task.bucket != NONE] or device.buckets
    names = {name for bucket in buckets for name in bucket.parameters}
    return all(first[name] != wait.pipeline_rank for name in names)


@pytest.mark.parametrize("text", STRATEGIES)
def test_late_tasks_change_no_bit(text: str) -> None:
    assert figures(plan(text), text, Delays(seed=1, most_s=2e-3)) == undisturbed(text)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
@pytest.mark.parametrize("text", STRATEGIES)
def test_many_ways_of_being_late_change_no_bit(text: str, seed: int) -> None:
    assert figures(plan(text), text, Delays(seed=seed, most_s=2e-3)) == undisturbed(text)


def test_a_missing_wait_that_matters_is_noticed() -> None:
    text = "pp=2,dp=2,schedule=zb_h1,zero=1"
    found = plan(text)
    chosen = random.Random(3).sample(that_matter(found), 8)
    assert [wait for wait in chosen if not is_noticed(found, text, wait)] == []


@pytest.mark.slow
@pytest.mark.parametrize("text", STRATEGIES)
def test_nearly_every_missing_wait_that_matters_is_noticed(text: str) -> None:
    found = plan(text)
    matter = that_matter(found)
    missed = [wait for wait in matter if not is_noticed(found, text, wait)]
    assert len(matter) >= 5
    assert len(missed) <= 0.05 * len(matter), missed


def test_what_the_checker_does_not_miss_a_run_does_not_miss() -> None:
    """Waits that only bound memory, or that others imply: without them nothing differs."""
    text = "pp=2,dp=2,schedule=zb_h1,zero=1"
    found = plan(text)
    matter = set(that_matter(found))
    idle = [wait for wait in waits(found) if wait not in matter]
    assert idle
    assert not is_noticed(found, text, idle[0])

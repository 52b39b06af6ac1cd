"""What a mutation gives back, and how it finds a place: `(plan, choose)` -> rank and task."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from simulator.plan import MATCHING_SEND, Plan, TaskKind
from tests.plan_edits import BACKWARDS

K = TaskKind
PASSES = {K.F, *BACKWARDS}
COUNTERPART = {send: recv for recv, send in MATCHING_SEND.items()} | MATCHING_SEND


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A broken plan and what was done to it, as short as it can be said."""

    plan: Plan
    what: str


Mutation = Callable[[Plan, random.Random], "Mutant | None"]


def anyone(plan: Plan, choose: random.Random, kinds: Iterable[TaskKind]) -> tuple[int, int] | None:
    """Return a random (rank, task) of these kinds."""
    wanted = [int(kind) for kind in kinds]
    places = [
        (device.pipeline_rank, int(number))
        for device in plan.device_plans
        for number in np.flatnonzero(np.isin(device.tasks.kind, wanted))
    ]
    return choose.choice(places) if places else None


def shuffled(choose: random.Random, items: Iterable[object]) -> list:
    found = list(items)
    choose.shuffle(found)
    return found


def places_of(plan: Plan, kinds: Iterable[TaskKind]) -> list[tuple[int, int]]:
    wanted = set(kinds)
    return [
        (device.pipeline_rank, number)
        for device in plan.device_plans
        for number, kind in enumerate(device.tasks.kind.tolist())
        if kind in wanted
    ]


def both_ends(plan: Plan, rank: int, number: int) -> list[tuple[int, int]]:
    """Return both ends of a transfer: (rank, task)."""
    task = plan.device_plans[rank].tasks.task(number)
    other = next(
        n for n, t in enumerate(plan.device_plans[task.peer].tasks)
        if (t.kind, t.peer, t.edge, t.microbatch)
        == (COUNTERPART[task.kind], rank, task.edge, task.microbatch)
    )  # fmt: skip
    return [(rank, number), (task.peer, other)]

"""Orders that are lost, swapped or circular."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from simulator.plan import COLLECTIVE_KINDS, RECV_KINDS, SEND_KINDS, Plan, Task, TaskKind, TaskTable
from tests.mutations.mutant import COUNTERPART, K, Mutant, anyone, places_of, shuffled
from tests.plan_edits import (
    BACKWARDS,
    LISTS,
    Order,
    cross_step_needs,
    edited,
    name,
    needs,
    ordered_across_steps,
    reordered,
    tasks_of,
    with_device,
    with_tasks,
)


def drop_wait(plan: Plan, choose: random.Random) -> Mutant | None:
    """An order that a device needs is kept by this wait alone."""
    for device in shuffled(choose, plan.device_plans):
        tasks = tasks_of(device)
        pairs = needs(plan, device)
        waits = [(number, wait) for number, task in enumerate(tasks) for wait in task.waits]
        for number, wait in shuffled(choose, waits):
            less = list(tasks)
            kept = tuple(other for other in tasks[number].waits if other != wait)
            less[number] = replace(tasks[number], waits=kept)
            if Order(less).loses(pairs):
                rank = device.pipeline_rank
                what = f"{name(plan, rank, number)} does not wait for {name(plan, rank, wait)}"
                return Mutant(plan=with_tasks(plan, rank, less), what=what)
    return None


def drop_wait_across_steps(plan: Plan, choose: random.Random) -> Mutant | None:
    """The next step may read parameters that are not written yet."""
    for device in shuffled(choose, plan.device_plans):
        tasks = tasks_of(device)
        order, pairs = Order(tasks), cross_step_needs(plan, device)
        waiting = [number for number, task in enumerate(tasks) if task.previous_step_waits]
        for number in shuffled(choose, waiting):
            less = list(tasks)
            less[number] = replace(tasks[number], previous_step_waits=())
            if not all(ordered_across_steps(less, order, pair) for pair in pairs):
                rank = device.pipeline_rank
                what = f"{name(plan, rank, number)} does not wait for the step before"
                return Mutant(plan=with_tasks(plan, rank, less), what=what)
    return None


def other_stream(plan: Plan, choose: random.Random) -> Mutant | None:
    """On a stream of its own a task no longer follows what it needs, or is no longer followed by it."""
    for device in shuffled(choose, plan.device_plans):
        tasks = tasks_of(device)
        pairs = needs(plan, device)
        streams = (*device.streams, "astray")
        for number in shuffled(choose, range(len(tasks))):
            moved = list(tasks)
            moved[number] = replace(tasks[number], stream=len(device.streams))
            if Order(moved).loses(pairs):
                rank = device.pipeline_rank
                changed = replace(device, streams=streams, tasks=TaskTable.from_tasks(moved))
                what = f"{name(plan, rank, number)} on a stream of its own"
                return Mutant(plan=with_device(plan, changed), what=what)
    return None


def swap_sends(plan: Plan, choose: random.Random) -> Mutant | None:
    """Two messages of one channel leave in an order in which they are not received."""
    return _swap_ends(plan, choose, SEND_KINDS)


def swap_receives(plan: Plan, choose: random.Random) -> Mutant | None:
    """Two messages of one channel are received in an order in which they are not sent."""
    return _swap_ends(plan, choose, RECV_KINDS)


def _swap_ends(plan: Plan, choose: random.Random, kinds: Iterable[TaskKind]) -> Mutant | None:
    for device in shuffled(choose, plan.device_plans):
        tasks = tasks_of(device)
        ends = [number for number, task in enumerate(tasks) if task.kind in kinds]
        for one, other in shuffled(choose, combinations(ends, 2)):
            mine = {(tasks[n].stream, tasks[n].peer) for n in (one, other)}
            theirs = {_other_stream(plan, device.pipeline_rank, tasks[n]) for n in (one, other)}
            if len(mine) == len(theirs) == 1:
                order = list(range(len(tasks)))
                order[one], order[other] = other, one
                rank = device.pipeline_rank
                what = f"{name(plan, rank, one)} and {name(plan, rank, other)} swapped"
                return Mutant(plan=with_tasks(plan, rank, reordered(tasks, order)), what=what)
    return None


def _other_stream(plan: Plan, rank: int, task: Task) -> int:
    """Return the stream of the other end of a transfer."""
    table = plan.device_plans[task.peer].tasks
    wanted = (COUNTERPART[task.kind], rank, task.edge, task.microbatch)
    columns = (table.kind, table.peer, table.edge, table.microbatch)
    met = np.all([column == value for column, value in zip(columns, wanted, strict=True)], axis=0)
    return int(table.stream[np.flatnonzero(met)[0]])


def swap_collectives(plan: Plan, choose: random.Random) -> Mutant | None:
    """Two ranks issue the collectives that they share in different orders."""
    spans = {n: set(group.pipeline_ranks) for n, group in enumerate(plan.groups)}
    for device in shuffled(choose, plan.device_plans):
        tasks, rank = tasks_of(device), device.pipeline_rank
        found = [n for n, task in enumerate(tasks) if task.kind in COLLECTIVE_KINDS]
        for one, other in shuffled(choose, combinations(found, 2)):
            shared = spans[tasks[one].group] & spans[tasks[other].group] - {rank}
            same = all(getattr(tasks[one], field) == getattr(tasks[other], field) for field in _IDENTITY)
            if shared and not same:
                what = f"{name(plan, rank, one)} and {name(plan, rank, other)} swapped on one rank"
                return Mutant(plan=with_tasks(plan, rank, _exchanged(tasks, one, other)), what=what)
    return None


def backward_before_forward(plan: Plan, choose: random.Random) -> Mutant | None:
    """A backward runs where the forward of its microbatch stood, and that one in its place."""
    first = anyone(plan, choose, {K.F})
    if first is None:
        return None
    rank, forward = first
    tasks = tasks_of(plan.device_plans[rank])
    same = [n for n, t in enumerate(tasks) if t.kind in BACKWARDS
            and (t.stage, t.microbatch) == (tasks[forward].stage, tasks[forward].microbatch)]  # fmt: skip
    if not same:
        return None
    other = choose.choice(same)
    more = ("first_segment", "last_segment", "work", *LISTS)
    what = f"{name(plan, rank, forward)} and {name(plan, rank, other)} swapped"
    return Mutant(plan=with_tasks(plan, rank, _exchanged(tasks, forward, other, more)), what=what)


_IDENTITY = ("kind", "stage", "microbatch", "part", "phase", "group", "bucket", "size_bytes")
"""What a collective is; two tasks that swap these keep their places, waits and streams."""


def _exchanged(tasks: Sequence[Task], one: int, other: int, more: Sequence[str] = ()) -> list[Task]:
    swapped = list(tasks)
    for here, there in ((one, other), (other, one)):
        fields = {field: getattr(tasks[there], field) for field in (*_IDENTITY, *more)}
        swapped[here] = replace(tasks[here], **fields)
    return swapped


def wait_in_a_circle(plan: Plan, choose: random.Random) -> Mutant | None:
    """A task waits for one that waits for it."""
    for device in shuffled(choose, plan.device_plans):
        tasks, rank = tasks_of(device), device.pipeline_rank
        order = Order(tasks)
        pairs = [(a, b) for b in range(len(tasks)) for a in range(b) if order.has(a, b)]
        if pairs:
            first, second = choose.choice(pairs)
            waits = (*tasks[first].waits, second)
            what = f"{name(plan, rank, first)} waits for {name(plan, rank, second)}, which follows it"
            return Mutant(plan=edited(plan, rank, first, waits=waits), what=what)
    return None


def wait_for_the_answer(plan: Plan, choose: random.Random) -> Mutant | None:
    """A forward is sent only after the gradient of what it sends has come back."""
    for rank, number in shuffled(choose, places_of(plan, {K.SEND_F})):
        tasks = tasks_of(plan.device_plans[rank])
        task = tasks[number]
        back = [n for n, t in enumerate(tasks) if t.kind is K.RECV_B
                and (t.edge, t.microbatch) == (task.edge, task.microbatch)]  # fmt: skip
        if back:
            what = f"{name(plan, rank, number)} waits for {name(plan, rank, back[0])}, its answer"
            return Mutant(plan=edited(plan, rank, number, waits=(*task.waits, back[0])), what=what)
    return None

"""What a host awaits before it launches a task: notes on run-ahead limit and blocking calls in `rules`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cost_models.price import CostModel
from simulator.plan import IndexLists, Plan, TaskKind

Ints = npt.NDArray[np.int64]


def host_waits(plan: Plan, *, kernels: Ints, stream: Ints, cost_model: CostModel) -> IndexLists:
    """Return by task the tasks whose end the host awaits before it launches it.

    Args:
        plan: whose device plans lie one after another.
        kernels: int64 [tasks], kernels that the host launches for each.
        stream: int64 [tasks], stream number over all device plans.
        cost_model: how far a host runs ahead, and what it blocks on.
    Returns: lists of task numbers; those of the step before are less the number of tasks (negative).
    """
    later, earlier = [], []
    counts = [len(device.tasks) for device in plan.device_plans]
    starts = np.cumsum([0, *counts])
    kind = np.concatenate([device.tasks.kind for device in plan.device_plans])
    blocking = np.isin(kind, _kinds(cost_model.blocking))
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        blocked = np.flatnonzero(blocking[first:last])
        later.append(first + (blocked + 1) % max(last - first, 1))
        earlier.append(first + blocked - np.where(blocked + 1 == last - first, len(kind), 0))
    if cost_model.awaited:
        found = _awaited(plan, np.isin(kind, _kinds(cost_model.awaited)))
        later.append(found[0])
        earlier.append(found[1])
    if cost_model.run_ahead_kernels is not None:
        found = _run_ahead(kernels, stream, limit=cost_model.run_ahead_kernels)
        later.append(found[0])
        earlier.append(found[1])
    return _grouped(np.concatenate(later), np.concatenate(earlier), rows=len(kind))


def _kinds(names: Sequence[str]) -> list[int]:
    return [int(TaskKind[name.upper()]) for name in names]


def _awaited(plan: Plan, seen: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Return (task, a task of `seen` that it waits for), of the same step."""
    later, earlier = [], []
    start = 0
    for device in plan.device_plans:
        waits = device.tasks.waits
        task = start + np.repeat(np.arange(len(device.tasks)), np.diff(waits.starts))
        wait = start + waits.values
        later.append(task[seen[wait]])
        earlier.append(wait[seen[wait]])
        start += len(device.tasks)
    return np.concatenate(later), np.concatenate(earlier)


def _run_ahead(kernels: Ints, stream: Ints, *, limit: int) -> tuple[Ints, Ints]:
    """Return (task, the last task of its stream that must have ended), where a queue of `limit` may be full.

    The kernels of a task end one by one, and make room one by one: the task that runs counts as if only its
    last kernel were left. So the host awaits nothing as long as that one and all behind it have room.
    """
    order = np.argsort(stream, kind="stable")
    borders = np.flatnonzero(np.diff(stream[order], prepend=-1, append=-1))
    later, earlier = [], []
    for first, last in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        tasks = order[first:last]
        twice = np.concatenate([tasks - len(stream), tasks])
        launched = np.concatenate([[0], np.cumsum(kernels[twice])])
        here = np.arange(len(tasks), 2 * len(tasks))
        running = np.searchsorted(launched, launched[here] + 2 - limit, side="left") - 1
        awaited = np.minimum(running, here - 1) - 1
        full = awaited >= 0
        later.append(tasks[full])
        earlier.append(twice[awaited[full]])
    none = [np.zeros(0, dtype=np.int64)]
    return np.concatenate(later + none), np.concatenate(earlier + none)


def _grouped(row: Ints, value: Ints, *, rows: int) -> IndexLists:
    starts = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(row, minlength=rows), out=starts[1:])
    return IndexLists(starts=starts, values=value[np.argsort(row, kind="stable")])

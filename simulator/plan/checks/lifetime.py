"""Buffers: one birth, one death, and every reader surely in between ([Note: happens before]).

A buffer of a microbatch belongs to the tasks of that microbatch. An all-reduce works in place: whoever else
reads its temporary buffers comes surely before or after it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from simulator.plan.checks.facts import DeviceFacts, Facts, Indices
from simulator.plan.checks.violation import Violation
from simulator.plan.plan import IndexLists
from simulator.plan.task import NONE, TaskKind


def check_lifetime(facts: Facts) -> list[Violation]:
    """Find buffers that are read outside their life, or born or freed not exactly once."""
    return [violation for device in facts.devices for violation in _device(device)]


def _device(device: DeviceFacts) -> Iterator[Violation]:
    table, persistent = device.plan.tasks, device.plan.buffers.persistent
    alloc_task, alloc_buffer = _flat(table.allocates)
    free_task, free_buffer = _flat(table.frees)
    read_task, read_buffer = _flat(table.reads)
    yield from _events(device, (alloc_task, alloc_buffer), "allocated")
    yield from _events(device, (free_task, free_buffer), "freed")
    born = _first(alloc_task, alloc_buffer, len(persistent))
    dead = _first(free_task, free_buffer, len(persistent))
    for buffer in np.flatnonzero((born != NONE) & (dead == NONE) & ~persistent).tolist():
        name = device.name(int(born[buffer]))
        message = f"{_buffer(device, buffer)} is allocated by {name} and never freed"
        yield Violation(rule="never-freed", message=message, tasks=(name,))
    yield from _early(device, (read_task, read_buffer), born, verb="reads")
    yield from _early(device, (free_task, free_buffer), born, verb="frees")
    yield from _late(device, (read_task, read_buffer), dead)
    yield from _raced(device, (read_task, read_buffer))
    for tasks, buffers in ((alloc_task, alloc_buffer), (read_task, read_buffer), (free_task, free_buffer)):
        yield from _foreign(device, tasks, buffers)


def _flat(lists: IndexLists) -> tuple[Indices, Indices]:
    """Return the tasks and the buffers of every entry."""
    return np.repeat(np.arange(len(lists.starts) - 1), np.diff(lists.starts)), lists.values


def _first(tasks: Indices, buffers: Indices, num_buffers: int) -> Indices:
    """Return by buffer the first task that names it, or NONE."""
    found = np.full(num_buffers, NONE, dtype=np.int64)
    found[buffers[::-1]] = tasks[::-1]
    return found


def _buffer(device: DeviceFacts, buffer: int) -> str:
    return f"buffer {buffer} of rank {device.rank} ({device.plan.buffers.owner_of(buffer)})"


def _events(device: DeviceFacts, entries: tuple[Indices, Indices], verb: str) -> Iterator[Violation]:
    """Yield buffers that are allocated (freed) twice, or at all although they are persistent."""
    tasks, buffers = entries
    persistent = device.plan.buffers.persistent
    for task, buffer in zip(tasks[persistent[buffers]], buffers[persistent[buffers]], strict=True):
        name = device.name(int(task))
        message = f"{_buffer(device, int(buffer))} is persistent, but {verb} by {name}"
        yield Violation(rule=f"persistent-{verb}", message=message, tasks=(name,))
    twice = np.flatnonzero(np.bincount(buffers, minlength=len(persistent)) > 1)
    for buffer in twice[~persistent[twice]].tolist():
        names = device.names(tasks[buffers == buffer].tolist())
        message = f"{_buffer(device, buffer)} is {verb} more than once: by {' and '.join(names)}"
        yield Violation(rule=f"{verb}-twice", message=message, tasks=names)


def _early(
    device: DeviceFacts, entries: tuple[Indices, Indices], born: Indices, *, verb: str
) -> Iterator[Violation]:
    """Yield tasks that read (free) a buffer which is not surely allocated when they start."""
    tasks, buffers = _of_temporary(device, entries)
    unborn = born[buffers] == NONE
    for task, buffer in zip(tasks[unborn].tolist(), buffers[unborn].tolist(), strict=True):
        name = device.name(task)
        message = f"{name} {verb} {_buffer(device, buffer)}, which nothing allocates"
        yield Violation(rule="never-allocated", message=message, tasks=(name,))
    tasks, buffers = tasks[~unborn], buffers[~unborn]
    makers = born[buffers]
    bad = (makers != tasks) & ~device.before(makers, tasks)
    for task, buffer, maker in _columns(bad, tasks, buffers, makers):
        names = device.names((task, maker))
        if device.before(np.array([task]), np.array([maker]))[0]:
            rule, how = "before-allocate", f"before {names[1]} allocates it"
        else:
            rule, how = (
                "missing-wait",
                f"without waiting for {names[1]} on another stream, which allocates it",
            )
        message = f"{names[0]} {verb} {_buffer(device, buffer)} {how}"
        yield Violation(rule=rule, message=message, tasks=names)


def _late(device: DeviceFacts, entries: tuple[Indices, Indices], dead: Indices) -> Iterator[Violation]:
    """Yield tasks that may still read a buffer when another task frees it."""
    tasks, buffers = _of_temporary(device, entries)
    known = dead[buffers] != NONE
    tasks, buffers = tasks[known], buffers[known]
    enders = dead[buffers]
    bad = (enders != tasks) & ~device.before(tasks, enders)
    for task, buffer, ender in _columns(bad, tasks, buffers, enders):
        names = device.names((task, ender))
        if device.before(np.array([ender]), np.array([task]))[0]:
            rule, how = "read-after-free", f"after {names[1]} freed it"
        else:
            rule, how = "freed-while-read", f"while {names[1]}, which does not wait for it, may free it"
        message = f"{names[0]} reads {_buffer(device, buffer)} {how}"
        yield Violation(rule=rule, message=message, tasks=names)


def _raced(device: DeviceFacts, entries: tuple[Indices, Indices]) -> Iterator[Violation]:
    """Yield readers of a buffer that an all-reduce may be changing at the same time."""
    tasks, buffers = _of_temporary(device, entries)
    table = device.plan.tasks
    changed = np.zeros(len(device.plan.buffers.persistent), dtype=np.bool_)
    changed[buffers[table.kind[tasks] == TaskKind.ALL_REDUCE]] = True
    tasks, buffers = tasks[changed[buffers]], buffers[changed[buffers]]
    order = np.lexsort((tasks, buffers))
    tasks, buffers = tasks[order], buffers[order]
    pair = (buffers[:-1] == buffers[1:]) & (tasks[:-1] != tasks[1:])
    first, second = tasks[:-1][pair], tasks[1:][pair]
    writes = (table.kind[first] == TaskKind.ALL_REDUCE) | (table.kind[second] == TaskKind.ALL_REDUCE)
    bad = writes & ~device.before(first, second) & ~device.before(second, first)
    for one, other, buffer in _columns(bad, first, second, buffers[1:][pair]):
        names = device.names((one, other))
        message = f"{names[0]} and {names[1]} use {_buffer(device, buffer)} in no order, and one changes it"
        yield Violation(rule="missing-wait", message=message, tasks=names)


def _foreign(device: DeviceFacts, tasks: Indices, buffers: Indices) -> Iterator[Violation]:
    """Yield tasks of one microbatch that use a buffer of another."""
    own, theirs = device.plan.tasks.microbatch[tasks], device.plan.buffers.microbatch[buffers]
    bad = (own != theirs) & (own != NONE) & (theirs != NONE)
    for task, buffer in dict.fromkeys(_columns(bad, tasks, buffers)):
        name = device.name(task)
        message = f"{name} uses {_buffer(device, buffer)}, which is of another microbatch"
        yield Violation(rule="wrong-microbatch", message=message, tasks=(name,))


def _of_temporary(device: DeviceFacts, entries: tuple[Indices, Indices]) -> tuple[Indices, Indices]:
    tasks, buffers = entries
    temporary = ~device.plan.buffers.persistent[buffers]
    return tasks[temporary], buffers[temporary]


def _columns(bad: npt.NDArray[np.bool_], *columns: Indices) -> Iterator[tuple[int, ...]]:
    return zip(*(column[bad].tolist() for column in columns), strict=True)

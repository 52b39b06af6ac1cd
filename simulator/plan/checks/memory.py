"""The least memory that a plan needs on each device, whatever the durations: what can never fit.

[Note: surely alive]
A temporary buffer is surely alive during a task of the compute stream that comes after (or is) the task
that allocates it and before (or is) the one that frees it ([Note: happens before]). The largest sum of such
buffers and the persistent ones is a lower bound of the peak of every execution of the plan.
"""

from __future__ import annotations

import numpy as np

from simulator.plan.checks.facts import DeviceFacts, Facts, Indices
from simulator.plan.plan import IndexLists
from simulator.plan.task import NONE

_COMPUTE_STREAM = 0


def least_bytes(facts: Facts) -> tuple[int, ...]:
    """Return, by pipeline rank, the least bytes that are allocated at some moment of a step."""
    return tuple(_of_device(device) for device in facts.devices)


def _of_device(device: DeviceFacts) -> int:
    table, buffers = device.plan.tasks, device.plan.buffers
    compute = np.flatnonzero(table.stream == _COMPUTE_STREAM)
    if device.stuck or not len(compute):
        return buffers.static_bytes
    born, dead = _ends(table.allocates, buffers.persistent), _ends(table.frees, buffers.persistent)
    known = np.flatnonzero((born != NONE) & (dead != NONE))
    first, last = _first_after(device, compute, born[known]), _last_before(device, compute, dead[known])
    alive = first <= last
    change = np.zeros(len(compute) + 1, dtype=np.int64)
    np.add.at(change, first[alive], buffers.size_bytes[known[alive]])
    np.add.at(change, last[alive] + 1, -buffers.size_bytes[known[alive]])
    return buffers.static_bytes + int(np.cumsum(change).max(initial=0))


def _ends(lists: IndexLists, persistent: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Indices:
    """Return by temporary buffer the task that lists it, or NONE."""
    found = np.full(len(persistent), NONE, dtype=np.int64)
    found[lists.values] = np.repeat(np.arange(len(lists.starts) - 1), np.diff(lists.starts))
    found[persistent] = NONE
    return found


def _first_after(device: DeviceFacts, compute: Indices, tasks: Indices) -> Indices:
    """Return, as places in `compute`, the first that is or surely comes after each task."""
    streams = device.plan.tasks.stream[tasks]
    found = np.searchsorted(compute, tasks)
    for stream in np.unique(streams[streams != _COMPUTE_STREAM]).tolist():
        done = device.clocks[device.clock_of[compute], stream]
        mine = streams == stream
        found[mine] = np.searchsorted(done, tasks[mine])
    return found


def _last_before(device: DeviceFacts, compute: Indices, tasks: Indices) -> Indices:
    """Return, as places in `compute`, the last that is or surely comes before each task."""
    own = device.plan.tasks.stream[tasks] == _COMPUTE_STREAM
    last = np.where(own, tasks, device.clocks[device.clock_of[tasks], _COMPUTE_STREAM])
    return np.asarray(np.searchsorted(compute, last, side="right") - 1)

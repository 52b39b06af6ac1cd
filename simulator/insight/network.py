"""`Network`: workload -> which task instances an instance comes after, over all steps of a timeline.

An instance is step * num_tasks + task. Edges are those of `simulator.rules`: waits of the step and of the one
before, the order of each stream; members of a collective and both ends of a message that is not eager share a
meeting, and start together. The host waits for nothing, so that its times are given.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simulator.plan import NONE, IndexLists
from simulator.timeline.timeline import Timeline
from simulator.workload import Workload

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Network:
    """What comes before what.

    Args:
        before: instances by instance, those that it waits for first, then the one before on its stream.
        meeting: int64 [instances], equal for those that start together.
        joined: instances by meeting.
        partner: int64 [instances], other end of an eager message, or NONE.
        duration_ns: int64 [instances], device time, or time on the wire.
        dispatch_ns, ready_ns, start_ns, end_ns: int64 [instances], as simulated.
    """

    before: IndexLists
    meeting: Ints
    joined: IndexLists
    partner: Ints
    duration_ns: Ints
    dispatch_ns: Ints
    ready_ns: Ints
    start_ns: Ints
    end_ns: Ints


def build_network(workload: Workload, timeline: Timeline) -> Network:
    """Return the network of a simulated timeline of this workload."""
    steps, num_tasks = timeline.num_steps, workload.num_tasks
    first = np.arange(steps)[:, None] * num_tasks
    partner = np.where(workload.eager, workload.partner, NONE)
    meeting, joined = _meetings(workload, steps=steps)
    return Network(
        before=_grouped(*_edges(workload, steps=steps), rows=steps * num_tasks),
        meeting=meeting,
        joined=joined,
        partner=np.where(partner == NONE, NONE, first + partner).ravel(),
        duration_ns=np.tile(workload.duration_ns, steps),
        dispatch_ns=_column(timeline, "dispatch_ns"),
        ready_ns=_column(timeline, "ready_ns"),
        start_ns=_column(timeline, "start_ns"),
        end_ns=_column(timeline, "end_ns"),
    )


def _column(timeline: Timeline, name: str) -> Ints:
    """Return a column of all tracks, step by step."""
    shape = (timeline.num_steps, -1)
    tables = [getattr(track, name).reshape(shape) for track in timeline.tracks]
    return np.concatenate(tables, axis=1, dtype=np.int64).ravel()


def _edges(workload: Workload, *, steps: int) -> tuple[Ints, Ints]:
    """Return (later, earlier) instances: waits, waits for the step before, and neighbours on a stream."""
    num_tasks = workload.num_tasks
    later, earlier = [], []
    for lists, back in ((workload.waits, 0), (workload.previous_step_waits, 1)):
        row = np.repeat(np.arange(num_tasks), np.diff(lists.starts))
        for step in range(back, steps):
            later.append(row + step * num_tasks)
            earlier.append(lists.values + (step - back) * num_tasks)
    order = np.argsort(np.tile(workload.stream, steps), kind="stable")
    stream = workload.stream[order % num_tasks] if num_tasks else order
    follows = np.flatnonzero(stream[1:] == stream[:-1])
    return np.concatenate([*later, order[follows + 1]]), np.concatenate([*earlier, order[follows]])


def _meetings(workload: Workload, *, steps: int) -> tuple[Ints, IndexLists]:
    """Return the meeting of every instance (alone: its own), and the instances of each."""
    num_tasks = workload.num_tasks
    task = np.arange(num_tasks)
    met = (workload.partner != NONE) & ~workload.eager
    name = np.where(met, np.minimum(task, workload.partner), task)
    name = np.where(workload.collective != NONE, num_tasks + workload.collective, name)
    _, number = np.unique(name, return_inverse=True)
    count = int(number.max(initial=-1)) + 1
    meeting = (np.arange(steps)[:, None] * count + number).ravel()
    return meeting, _grouped(meeting, np.arange(len(meeting)), rows=steps * count)


def _grouped(row: Ints, value: Ints, *, rows: int) -> IndexLists:
    starts = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(row, minlength=rows), out=starts[1:])
    return IndexLists(starts=starts, values=value[np.argsort(row, kind="stable")])

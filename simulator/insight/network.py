"""`Network`: workload -> which task instances an instance comes after, over all steps of a timeline.

An instance is step * num_tasks + task. Edges are those of `simulator.rules`: waits of the step and of the one
before, the order of each stream; members of a collective and both ends of a message that is not eager share a
meeting, and start together. A host launches one task after another, and awaits the end of some before.

[Note: durations as they were]  A task lasts from its start to its end, whatever slowed it. A computation that
    ends with its last launch lasted less: then what it takes alone counts. An eager receive takes the time of
    its send.
"""

from __future__ import annotations

from collections.abc import Mapping
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
        sender: int64 [instances], the send of what receives an eager message, else NONE.
        host_before: instances by instance: those whose end the host awaits before it launches this one.
        launched_before: int64 [instances], what the same host launches before, or NONE.
        duration_ns: int64 [instances], device time, or time on the wire; see the note above.
        host_begin_ns: int64 [instances], when the host begins to launch.
        dispatch_ns, ready_ns, start_ns, end_ns: int64 [instances], as simulated.
    """

    before: IndexLists
    meeting: Ints
    joined: IndexLists
    sender: Ints
    host_before: IndexLists
    launched_before: Ints
    duration_ns: Ints
    host_begin_ns: Ints
    dispatch_ns: Ints
    ready_ns: Ints
    start_ns: Ints
    end_ns: Ints


def build_network(workload: Workload, timeline: Timeline) -> Network:
    """Return the network of a simulated timeline of this workload."""
    steps, num_tasks = timeline.num_steps, workload.num_tasks
    first = np.arange(steps)[:, None] * num_tasks
    sender = np.where(workload.eager & ~workload.is_send, workload.partner, NONE)
    sender = np.where(sender == NONE, NONE, first + sender).ravel()
    meeting, joined = _meetings(workload, steps=steps)
    times = {name: _column(timeline, name) for name in ("dispatch_ns", "ready_ns", "start_ns", "end_ns")}
    return Network(
        before=_grouped(*_edges(workload, steps=steps), rows=steps * num_tasks),
        meeting=meeting,
        joined=joined,
        sender=sender,
        host_before=_host_before(workload, steps=steps),
        launched_before=_launched_before(workload, steps=steps),
        duration_ns=_durations(workload, sender, times, steps=steps),
        host_begin_ns=times["dispatch_ns"] - np.tile(workload.host_ns, steps),
        **times,
    )


def alone_ns(workload: Workload, *, steps: int) -> Ints:
    """Return how long every instance takes alone at full speed, int64 [instances]."""
    return np.concatenate([workload.step_duration_ns(step) for step in range(steps)])


def _durations(workload: Workload, sender: Ints, times: Mapping[str, Ints], *, steps: int) -> Ints:
    """Return how long instances lasted; see [Note: durations as they were]."""
    lasted, alone = times["end_ns"] - times["start_ns"], alone_ns(workload, steps=steps)
    is_compute = np.tile(workload.is_compute, steps)
    launched = is_compute & (times["end_ns"] == times["dispatch_ns"]) & (lasted > alone)
    lasted = np.where(launched, alone, lasted)
    found: Ints = np.where(sender == NONE, lasted, lasted[sender])
    return found


def _host_before(workload: Workload, *, steps: int) -> IndexLists:
    """Return the instances whose end a host awaits, by instance; see `Workload.host_waits`."""
    lists, num_tasks = workload.host_waits, workload.num_tasks
    row = np.repeat(np.arange(num_tasks), np.diff(lists.starts))
    later = (np.arange(steps)[:, None] * num_tasks + row).ravel()
    earlier = (np.arange(steps)[:, None] * num_tasks + lists.values).ravel()
    return _grouped(later[earlier >= 0], earlier[earlier >= 0], rows=steps * num_tasks)


def _launched_before(workload: Workload, *, steps: int) -> Ints:
    """Return what the host of an instance launches before it, step after step, or NONE."""
    before = np.arange(workload.num_tasks) - 1
    filled = np.flatnonzero(np.diff(workload.device_starts))
    firsts, lasts = workload.device_starts[filled], workload.device_starts[filled + 1] - 1
    before[firsts] = lasts - workload.num_tasks
    found = (np.arange(steps)[:, None] * workload.num_tasks + before).ravel()
    return np.where(found < 0, NONE, found)


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

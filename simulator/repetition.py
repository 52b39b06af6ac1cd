"""`Repetition`: the steady part of a short run, found and checked, so that a longer one is not simulated.

[Note: steady state]  A pipeline with many microbatches repeats itself: after some time every rank does what
    it did one period before, for other microbatches. If all streams of all ranks do so twice in a row, each
    task later by the same time, the state at the end of a period is that at its begin, so that any number of
    periods may be inserted there: all that follows is later, and otherwise the same. This holds with
    contention, too. What is not quite equal bounds the error that insertions make.
[Note: runs that are not steady yet]  A rank that is a little faster than another one empties or fills the
    queue between them for a long time, in which step times grow by equal amounts that are not the final ones.
    So equal growth of step times proves nothing; the ranks are compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simulator.distinct import distinct_rows
from simulator.plan import NONE, DevicePlan, IndexLists, MemoryClass, Plan, TaskKind
from simulator.timeline.attribution import Attribution, attribute_window
from simulator.timeline.timeline import RankTrack, Timeline

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Repetition:
    """A period of a run, and how often it is inserted [Note: steady state].

    Args:
        times: how often.
        period_ns: how long it is.
        ends_ns: int64 [steps], where it ends in each step: insertions come behind.
        copies: int64 [tasks], how many tasks each task of the plan stands for: 1, or 1 + times; by task of a
            `Workload`.
        attribution: of the period.
        tokens_per_step: of the step with all insertions.
    """

    times: int
    period_ns: int
    ends_ns: Ints
    copies: Ints
    attribution: Attribution
    tokens_per_step: int

    @property
    def inserted_ns(self) -> int:
        """Return how much longer a step is."""
        return self.times * self.period_ns

    def moved_ns(self, time_ns: int) -> int:
        """Return when something happens with the insertions that happens at `time_ns` without."""
        return time_ns + self.inserted_ns * int(np.count_nonzero(self.ends_ns <= time_ns))

    def step_ends_ns(self, step_end_ns: Ints) -> Ints:
        """Return the ends of the steps with the insertions."""
        return step_end_ns + self.inserted_ns * np.arange(1, len(step_end_ns) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """The end and the length of the last period of a step, in ns."""

    end: int
    length: int


def find_repetition(
    plan: Plan,
    timeline: Timeline,
    *,
    microbatches: int,
    times: int,
    tokens_per_step: int,
    tolerance: float,
) -> Repetition | None:
    """Return the last period of a run before any stage begins its last forward, or None: it is not steady.

    Args:
        plan, timeline: what was simulated.
        microbatches: of a period.
        times: how often the period will be inserted.
        tokens_per_step: of the step with all insertions.
        tolerance: largest error of the step time that an insertion may make, relative.
    """
    runs = [_StreamRuns(device, microbatches=microbatches) for device in plan.device_plans]
    windows = [_window(plan, timeline, step=step, microbatches=microbatches) for step in _steps(timeline)]
    if any(window is None for window in windows):
        return None
    found = [window for window in windows if window is not None]
    period_ns = found[-1].length
    error_ns = max(abs(window.length - period_ns) for window in found)
    copies = []
    for run, track in zip(runs, timeline.tracks, strict=True):
        for step, window in enumerate(found):
            late_ns = run.unlike_ns(track, step=step, window=window)
            if late_ns is None:
                return None
            error_ns = max(error_ns, late_ns)
        if not run.keeps_memory():
            return None
        copies.append(1 + times * run.repeated)
    if error_ns * times > tolerance * (timeline.step_time_ns + times * period_ns):
        return None
    last = found[-1]
    return Repetition(
        times=times,
        period_ns=period_ns,
        ends_ns=np.array([window.end for window in found], dtype=np.int64),
        copies=np.concatenate(copies),
        attribution=attribute_window(plan, timeline, begin=last.end - period_ns, end=last.end),
        tokens_per_step=tokens_per_step,
    )


def _steps(timeline: Timeline) -> range:
    return range(timeline.num_steps)


def _window(plan: Plan, timeline: Timeline, *, step: int, microbatches: int) -> _Window | None:
    """Return the period that ends when a stage first begins its last forward."""
    found = []
    for device, track in zip(plan.device_plans, timeline.tracks, strict=True):
        table = device.tasks
        start = _of_step(track.start_ns, step, len(table))
        for stage in device.stages:
            first = (table.kind == TaskKind.F) & (table.stage == stage)
            first &= table.first_segment == table.first_segment[first].min(initial=np.iinfo(np.int64).max)
            number, begun = table.microbatch[first], start[first]
            if not len(number) or number.max() < microbatches:
                return None
            end, before = (
                begun[number == wanted].min() for wanted in (number.max(), number.max() - microbatches)
            )
            found.append(_Window(end=int(end), length=int(end - before)))
    return min(found, key=lambda window: window.end) if found else None


def _of_step(column: Ints, step: int, num_tasks: int) -> Ints:
    return column[step * num_tasks : (step + 1) * num_tasks]


class _StreamRuns:
    """The tasks of a device plan by stream, and which of them belong to the last period.

    Attributes:
        repeated: int64 [tasks], 1 for those of the last period that was looked at, else 0.
    """

    def __init__(self, device: DevicePlan, *, microbatches: int) -> None:
        self.device, self.microbatches = device, microbatches
        table = device.tasks
        columns = (table.kind, table.stage, table.phase, table.part, table.bucket, table.group, table.peer)
        self.name = distinct_rows((*columns, table.edge, table.first_segment))[1]
        self.streams = [np.flatnonzero(table.stream == number) for number in range(len(device.streams))]
        self.repeated = np.zeros(len(table), dtype=np.int64)

    def unlike_ns(self, track: RankTrack, *, step: int, window: _Window) -> int | None:
        """Return how far the last period is from that before it, or None: they do other things."""
        start, end, dispatch = (
            _of_step(column, step, len(self.name))
            for column in (track.start_ns, track.end_ns, track.dispatch_ns)
        )
        self.repeated[:] = 0
        found = [0]
        for tasks in self.streams:
            begun = tasks[start[tasks] < window.end]
            if not len(begun) or start[begun[-1]] < window.end - 2 * window.length:
                continue
            count = self._count(begun)
            if count is None:
                return None
            last, before = begun[-count:], begun[-2 * count : -count]
            if not self._alike(last, before):
                return None
            self.repeated[last] = 1
            late = (column[last] - column[before] - window.length for column in (start, end))
            found += [int(np.abs(column).max()) for column in late]
            # A host that runs ahead may need less than a period; one that needs more will fall behind.
            found.append(int((dispatch[last] - dispatch[before]).max()) - window.length)
            if tasks is self.streams[0]:
                late_ns = np.maximum(np.minimum(dispatch, start) - _end_before(end, tasks, len(start)), 0)
                found.append(int(np.abs(late_ns[last] - late_ns[before]).sum()))
        return max(found)

    def _count(self, begun: Ints) -> int | None:
        """Return how many tasks of a stream make a period, looking back from its last one."""
        name, microbatch = self.name[begun], self.device.tasks.microbatch[begun]
        wanted = microbatch[-1] - (self.microbatches if microbatch[-1] != NONE else 0)
        same = np.flatnonzero((name[:-1] == name[-1]) & (microbatch[:-1] == wanted))
        if not len(same):
            return None
        count = len(begun) - 1 - int(same[-1])
        return count if 2 * count <= len(begun) else None

    def _alike(self, last: Ints, before: Ints) -> bool:
        number = self.device.tasks.microbatch
        moved = np.where(number[last] == NONE, 0, self.microbatches)
        same = (self.name[last] == self.name[before]) & (number[last] == number[before] + moved)
        return bool(same.all())

    def keeps_memory(self) -> bool:
        """Return whether the tasks of the period free as much as they allocate."""
        tasks = self.device.tasks
        taken, given = (self._bytes_of(lists) for lists in (tasks.allocates, tasks.frees))
        return bool((taken == given).all())

    def _bytes_of(self, lists: IndexLists) -> Ints:
        """Return the bytes by class in the lists of the tasks of the period."""
        buffers = self.device.buffers
        values = lists.values[np.repeat(self.repeated, np.diff(lists.starts)) > 0]
        total = np.zeros(len(MemoryClass), dtype=np.int64)
        np.add.at(total, buffers.memory_class[values].astype(np.int64), buffers.size_bytes[values])
        return total


def _end_before(end: Ints, tasks: Ints, num_tasks: int) -> Ints:
    """Return for each of some tasks of a stream when the one before it ended, int64 [all tasks]."""
    found = np.zeros(num_tasks, dtype=np.int64)
    found[tasks[1:]] = end[tasks[:-1]]
    return found

"""Which task runs a pass of a segment for a microbatch, as tables over one device's segments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from simulator.plan.plan import DevicePlan
from simulator.plan.task import NONE, TaskKind

Indices = npt.NDArray[np.int64]

PASS_KINDS = (TaskKind.F, TaskKind.B, TaskKind.BI, TaskKind.BW, TaskKind.R)


@dataclass(frozen=True, kw_only=True, eq=False)
class Passes:
    """The passes of one device.

    Args:
        segments: segments of its stages, rising.
        row: int64 [all segments], position in `segments`, or -1.
        task: by kind int64 [segments, microbatch], the first task that runs it, or -1.
        count: by kind int64 [segments, microbatch], how many tasks run it.
        strangers: tasks that cover segments of other stages or devices.
    """

    segments: Indices
    row: Indices
    task: dict[TaskKind, Indices]
    count: dict[TaskKind, Indices]
    strangers: tuple[int, ...]

    @cached_property
    def gradient(self) -> Indices:
        """Return the tasks that give the gradients of a segment's inputs: B, or BI when split."""
        fused = self.task[TaskKind.B]
        return np.where(fused == NONE, self.task[TaskKind.BI], fused)

    @cached_property
    def weights(self) -> Indices:
        """Return the tasks that give the gradients of a segment's parameters: B, or BW when split."""
        fused = self.task[TaskKind.B]
        return np.where(fused == NONE, self.task[TaskKind.BW], fused)


def passes_of(device: DevicePlan, stage_of: Indices, *, num_microbatches: int) -> Passes:
    """Tabulate the passes of a device; `stage_of` is the stage of every segment."""
    segments = np.flatnonzero(np.isin(stage_of, device.stages))
    row = np.full(len(stage_of), NONE, dtype=np.int64)
    row[segments] = np.arange(len(segments))
    shape = (len(segments), num_microbatches)
    task, count, strangers = {}, {}, []
    for kind in PASS_KINDS:
        tasks = np.flatnonzero(device.tasks.kind == kind)
        at_home = _at_home(device, tasks, stage_of)
        strangers += tasks[~at_home].tolist()
        task[kind], count[kind] = _tabulate(device, tasks[at_home], row, shape=shape)
    return Passes(segments=segments, row=row, task=task, count=count, strangers=tuple(sorted(strangers)))


def _at_home(device: DevicePlan, tasks: Indices, stage_of: Indices) -> Indices:
    """Return which tasks cover segments of their own stage only, on this device."""
    table = device.tasks
    stage, first, last = table.stage[tasks], table.first_segment[tasks], table.last_segment[tasks]
    whole: Indices = np.isin(stage, device.stages) & (stage_of[first] == stage) & (stage_of[last] == stage)
    return whole


def _tabulate(
    device: DevicePlan, tasks: Indices, row: Indices, *, shape: tuple[int, int]
) -> tuple[Indices, Indices]:
    table = device.tasks
    first, last = row[table.first_segment[tasks]], row[table.last_segment[tasks]]
    lengths = last - first + 1
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    cells = (np.repeat(first, lengths) + within, np.repeat(table.microbatch[tasks], lengths))
    count = np.zeros(shape, dtype=np.int64)
    np.add.at(count, cells, 1)
    task = np.full(shape, NONE, dtype=np.int64)
    task[cells[0][::-1], cells[1][::-1]] = np.repeat(tasks, lengths)[::-1]
    return task, count

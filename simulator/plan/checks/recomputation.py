"""Activations that were thrown away are made again once, wherever a backward needs them.

[Note: who lacks activations]
What a backward reads, only its kernels say. But of two microbatches of one size whose forward of a segment
keeps as many bytes, either both recompute the segment or none: else one of them lacks activations.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simulator.distinct import distinct_rows
from simulator.plan.checks.facts import DeviceFacts, Facts, Flags, Indices
from simulator.plan.checks.passes import Passes
from simulator.plan.checks.violation import Violation
from simulator.plan.task import NONE, TaskKind


def check_recomputation(facts: Facts) -> list[Violation]:
    """Find segments that are recomputed twice, or for some of equal microbatches only."""
    sizes = np.array(facts.plan.training.micro_batch_sizes, dtype=np.int64)
    return [violation for device in facts.devices for violation in _device(facts, device, sizes)]


def _device(facts: Facts, device: DeviceFacts, sizes: Indices) -> Iterator[Violation]:
    passes = facts.passes[device.rank]
    count = passes.count[TaskKind.R]
    if not count.any():
        return
    for stage, microbatch, rows in _by_stage(facts, passes, count > 1):
        what = "is recomputed more than once"
        yield _violation(device, "recomputed-twice", what, cell=(passes, stage, microbatch, rows))
    lacking, example = _lacking(passes, _kept_bytes(device, passes.task[TaskKind.F]), sizes)
    for stage, microbatch, rows in _by_stage(facts, passes, lacking):
        other = example[rows[0], microbatch]
        what = (
            f"is not recomputed, though its forward keeps no more than that of microbatch {other}, which is"
        )
        yield _violation(device, "never-recomputed", what, cell=(passes, stage, microbatch, rows))


def _kept_bytes(device: DeviceFacts, forward: Indices) -> Indices:
    """Return what the forwards allocate, int64 [segments, microbatch]."""
    lists = device.plan.tasks.allocates
    totals = np.zeros(len(lists.values) + 1, dtype=np.int64)
    np.cumsum(device.plan.buffers.size_bytes[lists.values], out=totals[1:])
    by_task = totals[lists.starts[1:]] - totals[lists.starts[:-1]]
    return np.asarray(np.where(forward == NONE, NONE, by_task[forward]))


def _lacking(passes: Passes, kept: Indices, sizes: Indices) -> tuple[Flags, Indices]:
    """Return [segments, microbatch]: who lacks activations, and a microbatch of its kind that has them."""
    made, shape = passes.count[TaskKind.R] > 0, kept.shape
    row, microbatch = (grid.ravel() for grid in np.indices(shape))
    _, kind = distinct_rows([row, sizes[microbatch], kept.ravel()])
    example = np.full(int(kind.max(initial=0)) + 1, NONE, dtype=np.int64)
    example[kind[made.ravel()]] = microbatch[made.ravel()]
    found = example[kind].reshape(shape)
    ran = (passes.task[TaskKind.F] != NONE) & (passes.gradient != NONE)
    return ~made & ran & (found != NONE), found


def _by_stage(facts: Facts, passes: Passes, bad: Flags) -> Iterator[tuple[int, int, Indices]]:
    """Yield (stage, microbatch, rows of segments) of the cells that are bad."""
    stages = facts.stage_of_segment[passes.segments]
    for stage in np.unique(stages[bad.any(axis=1)]).tolist():
        mine = bad & (stages == stage)[:, None]
        for microbatch in np.flatnonzero(mine.any(axis=0)).tolist():
            yield stage, microbatch, np.flatnonzero(mine[:, microbatch])


def _violation(
    device: DeviceFacts, rule: str, what: str, *, cell: tuple[Passes, int, int, Indices]
) -> Violation:
    passes, stage, microbatch, rows = cell
    first, last = passes.segments[rows[0]], passes.segments[rows[-1]]
    tasks = np.unique(passes.gradient[rows, microbatch])
    message = (
        f"microbatch {microbatch} of stage {stage} (segments {first}..{last}) on rank {device.rank} {what}"
    )
    names = device.names(tasks[tasks != NONE].tolist())
    return Violation(rule=rule, message=message, tasks=names, stages=(stage,))

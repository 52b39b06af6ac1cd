"""Collectives within a pass (tensor, context, expert parallel) happen for every microbatch alike.

[Note: exchanges]
A collective of a microbatch without a bucket serves the pass that `phase` and `part` name. Whether a
segment needs it, only its kernels say; but what one microbatch exchanges, every microbatch that runs that
pass of that stage on the device must exchange, as often.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simulator.plan.checks.facts import DeviceFacts, Facts, Indices
from simulator.plan.checks.violation import Violation
from simulator.plan.task import COLLECTIVE_KINDS, NONE, TaskKind

_KINDS = np.array(sorted(COLLECTIVE_KINDS), dtype=np.int64)
_BACKWARD = (TaskKind.B, TaskKind.BI)
_RUNS: dict[int, tuple[TaskKind, ...]] = {TaskKind.B: _BACKWARD, TaskKind.R: _BACKWARD}
"""Tasks that run a pass: B serves BI too, and what is made again serves both."""
_COLUMNS = ("kind", "stage", "group", "phase", "part")


def check_exchanges(facts: Facts) -> list[Violation]:
    """Find collectives that one microbatch lacks, or has more often than the others."""
    return [violation for device in facts.devices for violation in _device(facts, device)]


def _device(facts: Facts, device: DeviceFacts) -> Iterator[Violation]:
    table = device.plan.tasks
    tasks = np.flatnonzero(np.isin(table.kind, _KINDS) & (table.bucket == NONE) & (table.microbatch != NONE))
    if not len(tasks):
        return
    rows = np.stack([getattr(table, name)[tasks] for name in _COLUMNS], axis=1)
    keys, key_of = np.unique(rows, axis=0, return_inverse=True)
    shape = (len(keys), facts.plan.training.num_microbatches)
    counts = np.zeros(shape, dtype=np.int64)
    np.add.at(counts, (key_of.ravel(), table.microbatch[tasks]), 1)
    for number, (kind, stage, _, phase, part) in enumerate(keys.tolist()):
        runs = _microbatches(device, stage, phase)
        amounts = counts[number][runs]
        usual = int(np.argmax(np.bincount(amounts)))
        same = tasks[key_of.ravel() == number]
        for microbatch in runs[amounts != usual].tolist():
            names = device.names(same[table.microbatch[same] == microbatch].tolist())
            place = f" in {TaskKind(phase).name}" if phase != NONE else ""
            message = (
                f"microbatch {microbatch} of stage {stage} has {counts[number, microbatch]} "
                f"{TaskKind(kind).name}{place}{f' at segment {part}' if part != NONE else ''} on rank "
                f"{device.rank}, the other microbatches have {usual}"
            )
            yield Violation(rule="exchange-count", message=message, tasks=names, stages=(stage,))


def _microbatches(device: DeviceFacts, stage: int, phase: int) -> Indices:
    """Return the microbatches of a stage that run a pass on a device; of any pass where none is named."""
    table = device.plan.tasks
    kinds = _RUNS.get(phase, (TaskKind(phase),) if phase != NONE else (TaskKind.F,))
    return np.unique(table.microbatch[(table.stage == stage) & np.isin(table.kind, kinds)])

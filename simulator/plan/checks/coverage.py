"""Every (segment, microbatch) runs forward once and backward once, on the device of its stage."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from simulator.plan.checks.facts import DeviceFacts, Facts
from simulator.plan.checks.passes import Passes, passes_of
from simulator.plan.checks.violation import Violation
from simulator.plan.task import TaskKind


def check_coverage(facts: Facts) -> list[Violation]:
    """Find passes that are forgotten, repeated, or run on a device that lacks the stage."""
    found: list[Violation] = []
    for device in facts.devices:
        passes = passes_of(facts, device)
        found += _strangers(facts, device, passes)
        found += _miscounted(facts, device, passes)
    homeless = sorted({segment.stage for segment in facts.plan.segments} ^ set(range(len(facts.owner))))
    for stage in homeless:
        found.append(Violation(rule="stage-lost", message=f"stage {stage} has no segments or no device"))
    return found


def _strangers(facts: Facts, device: DeviceFacts, passes: Passes) -> Iterator[Violation]:
    for task in passes.strangers:
        first, last = (int(column[task]) for column in _range_columns(device))
        owners = sorted({facts.owner[facts.plan.segments[segment].stage] for segment in (first, last)})
        home = ", ".join(f"rank {owner}" for owner in owners)
        message = (
            f"{device.name(task)} covers segments {first}..{last}, which are not all of its stage ({home})"
        )
        yield Violation(rule="wrong-stage", message=message, tasks=(device.name(task),))


def _range_columns(device: DeviceFacts) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    return device.plan.tasks.first_segment, device.plan.tasks.last_segment


def _miscounted(facts: Facts, device: DeviceFacts, passes: Passes) -> Iterator[Violation]:
    forward = passes.count[TaskKind.F] != 1
    fused, inputs, weights = (passes.count[kind] for kind in (TaskKind.B, TaskKind.BI, TaskKind.BW))
    backward = ~(((fused == 1) & (inputs + weights == 0)) | ((fused == 0) & (inputs == 1) & (weights == 1)))
    yield from _miscounted_pass(facts, device, (passes, forward, (TaskKind.F,)))
    yield from _miscounted_pass(facts, device, (passes, backward, (TaskKind.B, TaskKind.BI, TaskKind.BW)))


def _miscounted_pass(
    facts: Facts,
    device: DeviceFacts,
    found: tuple[Passes, npt.NDArray[np.bool_], tuple[TaskKind, ...]],
) -> Iterator[Violation]:
    """Yield one violation per stage and microbatch that has a wrong cell."""
    passes, bad, kinds = found
    stages = np.array([facts.plan.segments[segment].stage for segment in passes.segments], dtype=np.int64)
    for stage in device.plan.stages:
        of_stage = np.flatnonzero(stages == stage)
        for microbatch in np.flatnonzero(bad[of_stage].any(axis=0)).tolist():
            rows = of_stage[bad[of_stage, microbatch]]
            counts = " + ".join(
                f"{int(passes.count[kind][rows[0], microbatch])} {kind.name}" for kind in kinds
            )
            need = "1 F" if kinds == (TaskKind.F,) else "1 B, or 1 BI and 1 BW"
            segments = f"segments {passes.segments[rows[0]]}..{passes.segments[rows[-1]]}"
            message = (
                f"stage {stage} microbatch {microbatch} ({segments}) has {counts} on rank {device.rank}, "
                f"must be {need}"
            )
            tasks = _tasks_of(device, kinds, (stage, microbatch))
            rule = "forward-count" if kinds == (TaskKind.F,) else "backward-count"
            yield Violation(rule=rule, message=message, tasks=tasks)


def _tasks_of(device: DeviceFacts, kinds: tuple[TaskKind, ...], place: tuple[int, int]) -> tuple[str, ...]:
    table = device.plan.tasks
    same = (table.stage == place[0]) & (table.microbatch == place[1]) & np.isin(table.kind, kinds)
    return device.names(np.flatnonzero(same).tolist())

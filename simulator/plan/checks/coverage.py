"""Every (segment, microbatch) runs forward once and backward once, on a device that holds its stage.

A stage that several pipeline ranks hold shares its microbatches out among them: each runs on one of them,
forward and backward on the same. A segment none of whose outputs needs a gradient has no backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from simulator.plan.checks.facts import DeviceFacts, Facts, Flags, Indices
from simulator.plan.checks.violation import Violation
from simulator.plan.task import NONE, TaskKind

_BACKWARD = (TaskKind.B, TaskKind.BI, TaskKind.BW)


def check_coverage(facts: Facts) -> list[Violation]:
    """Find passes that are forgotten, repeated, or run on a device that lacks the stage."""
    found: list[Violation] = []
    for device in facts.devices:
        found += _strangers(facts, device)
    for stage in range(len(facts.homes)):
        counts = _Counts.of(facts, stage)
        found += _miscounted(facts, counts)
        found += _torn(facts, counts)
    homeless = sorted({segment.stage for segment in facts.plan.segments} ^ set(range(len(facts.homes))))
    for stage in homeless:
        found.append(Violation(rule="stage-lost", message=f"stage {stage} has no segments or no device"))
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Counts:
    """How often each pass of a stage runs.

    Args:
        stage: the stage.
        segments: its segments, rising.
        by_rank: by pipeline rank and kind int64 [segments, microbatch].
    """

    stage: int
    segments: Indices
    by_rank: dict[int, dict[TaskKind, Indices]]

    @classmethod
    def of(cls, facts: Facts, stage: int) -> _Counts:
        segments = np.flatnonzero(facts.stage_of_segment == stage)
        by_rank = {}
        for rank in facts.homes[stage]:
            passes = facts.passes[rank]
            rows = passes.row[segments]
            by_rank[rank] = {kind: count[rows] for kind, count in passes.count.items()}
        return cls(stage=stage, segments=segments, by_rank=by_rank)

    def total(self, kind: TaskKind) -> Indices:
        tables = [counts[kind] for counts in self.by_rank.values()]
        total: Indices = np.sum(tables, axis=0, dtype=np.int64)
        return total


def _strangers(facts: Facts, device: DeviceFacts) -> Iterator[Violation]:
    for task in facts.passes[device.rank].strangers:
        table = device.plan.tasks
        first, last = int(table.first_segment[task]), int(table.last_segment[task])
        stages = (facts.plan.segments[segment].stage for segment in (first, last))
        owners = sorted({rank for stage in stages for rank in facts.homes[stage]})
        home = ", ".join(f"rank {owner}" for owner in owners)
        message = (
            f"{device.name(task)} covers segments {first}..{last}, which are not all of its stage ({home})"
        )
        yield Violation(rule="wrong-stage", message=message, tasks=(device.name(task),))


def _miscounted(facts: Facts, counts: _Counts) -> Iterator[Violation]:
    forward = counts.total(TaskKind.F) != 1
    fused, inputs, weights = (counts.total(kind) for kind in _BACKWARD)
    whole = ((fused == 1) & (inputs + weights == 0)) | ((fused == 0) & (inputs == 1) & (weights == 1))
    needed = facts.needs_backward[counts.segments][:, None]
    backward = np.where(needed, ~whole, fused + inputs + weights > 0)
    yield from _miscounted_pass(facts, counts, (forward, (TaskKind.F,)))
    yield from _miscounted_pass(facts, counts, (backward, _BACKWARD))


def _miscounted_pass(
    facts: Facts, counts: _Counts, found: tuple[Flags, tuple[TaskKind, ...]]
) -> Iterator[Violation]:
    """Yield one violation per microbatch that has a wrong cell."""
    bad, kinds = found
    ranks = " and ".join(f"rank {rank}" for rank in counts.by_rank)
    for microbatch in np.flatnonzero(bad.any(axis=0)).tolist():
        rows = np.flatnonzero(bad[:, microbatch])
        amounts = " + ".join(f"{int(counts.total(kind)[rows[0], microbatch])} {kind.name}" for kind in kinds)
        segments = f"segments {counts.segments[rows[0]]}..{counts.segments[rows[-1]]}"
        message = (
            f"stage {counts.stage} microbatch {microbatch} ({segments}) has {amounts} on {ranks}, "
            f"must be {_need(facts, int(counts.segments[rows[0]]), kinds)}"
        )
        yield Violation(
            rule="forward-count" if kinds == (TaskKind.F,) else "backward-count",
            message=message,
            tasks=_tasks_of(facts, counts, (kinds, microbatch)),
            stages=(counts.stage,),
        )


def _need(facts: Facts, segment: int, kinds: tuple[TaskKind, ...]) -> str:
    if kinds == (TaskKind.F,):
        return "1 F"
    return "1 B, or 1 BI and 1 BW" if facts.needs_backward[segment] else "none: nothing needs a gradient"


def _tasks_of(facts: Facts, counts: _Counts, which: tuple[tuple[TaskKind, ...], int]) -> tuple[str, ...]:
    kinds, microbatch = which
    names: tuple[str, ...] = ()
    for rank in counts.by_rank:
        device = facts.devices[rank]
        table = device.plan.tasks
        same = (table.stage == counts.stage) & (table.microbatch == microbatch)
        names += device.names(np.flatnonzero(same & np.isin(table.kind, kinds)).tolist())
    return names


def _torn(facts: Facts, counts: _Counts) -> Iterator[Violation]:
    """Yield backward (and recompute) passes on another rank than the forward of that microbatch."""
    if len(counts.by_rank) == 1:
        return
    place = facts.place[counts.stage]
    for rank, of_rank in counts.by_rank.items():
        ran = sum(of_rank[kind] for kind in (*_BACKWARD, TaskKind.R))
        away = np.asarray(ran).any(axis=0) & (place != rank) & (place != NONE)
        for microbatch in np.flatnonzero(away).tolist():
            message = (
                f"stage {counts.stage} microbatch {microbatch} runs backward on rank {rank}, "
                f"but its forward on rank {place[microbatch]}"
            )
            yield Violation(
                rule="wrong-copy",
                message=message,
                tasks=_tasks_of(facts, counts, ((TaskKind.F, *_BACKWARD), microbatch)),
                stages=(counts.stage,),
            )

"""Ranks that keep apart what they share, or go on with samples or tokens of others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from simulator.plan import COLLECTIVE_KINDS, NONE, Plan, Task, TaskKind
from tests.mutations.mutant import Mutant, places_of
from tests.plan_edits import REDUCTIONS, tasks_of, with_tasks, without


def replicas_apart(plan: Plan, choose: random.Random) -> Mutant | None:
    """The replicas of a group are summed in halves, so that each half has gradients of its own."""
    reduced = {
        device.buckets[bucket].group
        for device in plan.device_plans
        for bucket, kind in zip(device.tasks.bucket.tolist(), device.tasks.kind.tolist(), strict=True)
        if kind in REDUCTIONS and bucket != NONE
    }
    wide = [
        n for n in sorted(reduced) if plan.groups[n].size % 2 == 0 and len(plan.groups[n].pipeline_ranks) == 1
    ]
    if not wide:
        return None
    return _halved(plan, choose.choice(wide))


def experts_apart(plan: Plan, choose: random.Random) -> Mutant | None:
    """Tokens travel to half of the experts only: the other half never sees them."""
    wide = [n for n, group in enumerate(plan.groups) if group.axis == "ep" and group.size % 2 == 0]
    return _halved(plan, choose.choice(wide)) if wide else None


def ranks_apart(plan: Plan, choose: random.Random) -> Mutant | None:
    """What ranks cut between them, or sum over all of them, half of them keep to themselves."""
    wide = [
        n
        for n, group in enumerate(plan.groups)
        if group.size % 2 == 0
        and (group.axis in ("tp", "cp") or group.name == "world" or len(group.pipeline_ranks) > 1)
    ]
    return _halved(plan, choose.choice(wide)) if wide else None


def _halved(plan: Plan, number: int) -> Mutant:
    """Return the plan in which each set of a group falls into two."""
    group = plan.groups[number]
    half = group.size // 2
    members = tuple(part for ranks in group.members for part in (ranks[:half], ranks[half:]))
    groups = list(plan.groups)
    groups[number] = replace(group, members=members)
    return Mutant(plan=replace(plan, groups=tuple(groups)), what=f"group {group.name} is {members}")


def drop_regrouping(plan: Plan, choose: random.Random) -> Mutant | None:
    """No microbatch is regrouped: ranks go on with samples or tokens of others."""
    places = [
        (rank, task.stage, task.phase)
        for rank, number in places_of(plan, COLLECTIVE_KINDS)
        if _regroups(plan, task := plan.device_plans[rank].tasks.task(number))
    ]
    if not places:
        return None
    rank, stage, phase = choose.choice(sorted(set(places)))
    what = f"stage {stage} of rank {rank} regroups nothing in {TaskKind(phase).name}"
    return Mutant(plan=without_regrouping(plan, rank, stage, phase), what=what)


def without_regrouping(plan: Plan, rank: int, stage: int, phase: int) -> Plan:
    """Return the plan without what a stage regroups in a pass: tasks take what arrives as it is."""
    tasks = tasks_of(plan.device_plans[rank])
    gone = {
        number for number, task in enumerate(tasks)
        if _regroups(plan, task) and (task.stage, task.phase) == (stage, phase)
    }  # fmt: skip
    arrived = {made: tasks[n].reads for n in gone for made in tasks[n].allocates}
    for number, task in enumerate(tasks):
        frees = () if number in gone else _instead_of(task.frees, arrived)
        tasks[number] = replace(task, reads=_instead_of(task.reads, arrived), frees=frees)
    return with_tasks(plan, rank, without(tasks, gone))


def _instead_of(buffers: Sequence[int], others: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(other for buffer in buffers for other in others.get(buffer, (buffer,))))


def _regroups(plan: Plan, task: Task) -> bool:
    inside = task.kind in COLLECTIVE_KINDS and len(plan.groups[task.group].pipeline_ranks) == 1
    return inside and task.microbatch != NONE and plan.groups[task.group].axis == "pp"

"""Buffers that are freed too early, never, or twice, and such as are too small."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from simulator.plan import COLLECTIVE_KINDS, NONE, RECV_KINDS, SEND_KINDS, DevicePlan, MemoryClass, Plan
from tests.mutations.mutant import Mutant, shuffled
from tests.plan_edits import (
    REDUCTIONS,
    Order,
    edited,
    name,
    tasks_of,
    uses_of,
    with_device,
    with_tasks,
)


def free_early(plan: Plan, choose: random.Random) -> Mutant | None:
    """A buffer is freed by an earlier user; a later one surely or possibly reads it after that."""
    for device in shuffled(choose, plan.device_plans):
        tasks, rank = tasks_of(device), device.pipeline_rank
        order = Order(tasks)
        uses = uses_of(device, tasks)
        for buffer in shuffled(choose, uses):
            makers, readers, enders = uses[buffer]
            for early in shuffled(choose, {*makers, *readers} - set(enders)):
                late = [n for n in {*readers, *enders} - {early} if not order.has(n, early)]
                if len(enders) == 1 and any(buffer in tasks[n].reads for n in late):
                    moved = list(tasks)
                    end = enders[0]
                    kept = tuple(b for b in tasks[end].frees if b != buffer)
                    moved[end] = replace(tasks[end], frees=kept)
                    moved[early] = replace(moved[early], frees=(*moved[early].frees, buffer))
                    what = f"{name(plan, rank, early)} frees what {name(plan, rank, end)} should free"
                    return Mutant(plan=with_tasks(plan, rank, moved), what=what)
    return None


def never_free(plan: Plan, choose: random.Random) -> Mutant | None:
    """A buffer of each step stays: memory grows without end."""
    return _edit_list(plan, choose, "frees", lambda listed, buffer: [b for b in listed if b != buffer])


def never_allocate(plan: Plan, choose: random.Random) -> Mutant | None:
    """A buffer is used that nobody allocates."""
    return _edit_list(plan, choose, "allocates", lambda listed, buffer: [b for b in listed if b != buffer])


def _edit_list(
    plan: Plan, choose: random.Random, column: str, edit: Callable[[list[int], int], list[int]]
) -> Mutant | None:
    places = [
        (device.pipeline_rank, number, buffer)
        for device in plan.device_plans
        for number, listed in enumerate(getattr(device.tasks, column).to_rows())
        for buffer in listed
    ]
    if not places:
        return None
    rank, number, buffer = choose.choice(places)
    listed = list(getattr(plan.device_plans[rank].tasks.task(number), column))
    what = f"{name(plan, rank, number)}: buffer {buffer} is no longer in {column}"
    return Mutant(plan=edited(plan, rank, number, **{column: tuple(edit(listed, buffer))}), what=what)


def free_twice(plan: Plan, choose: random.Random) -> Mutant | None:
    """A later task of the same stream frees a buffer again."""
    for device in shuffled(choose, plan.device_plans):
        tasks, rank = tasks_of(device), device.pipeline_rank
        for number in shuffled(choose, [n for n, task in enumerate(tasks) if task.frees]):
            later = [n for n in range(number + 1, len(tasks)) if tasks[n].stream == tasks[number].stream]
            if later:
                again, buffer = choose.choice(later), choose.choice(tasks[number].frees)
                what = f"{name(plan, rank, again)} frees again what {name(plan, rank, number)} freed"
                return Mutant(plan=edited(plan, rank, again, frees=(*tasks[again].frees, buffer)), what=what)
    return None


def shrink_buffer(plan: Plan, choose: random.Random) -> Mutant | None:
    """A buffer is smaller than what the plan says is put there, or than that of an equal task."""
    device = choose.choice(plan.device_plans)
    for buffer in shuffled(choose, range(len(device.buffers.size_bytes))):
        if _is_stated(plan, device, buffer):
            sizes = device.buffers.size_bytes.copy()
            size = int(sizes[buffer])
            sizes[buffer] = choose.choice([size // 2, size - 1])
            changed = replace(device, buffers=replace(device.buffers, size_bytes=sizes))
            owner = device.buffers.owner_of(buffer)
            what = f"rank {device.pipeline_rank}: {owner} has {sizes[buffer]} instead of {size} bytes"
            return Mutant(plan=with_device(plan, changed), what=what)
    return None


def _is_stated(plan: Plan, device: DevicePlan, buffer: int) -> bool:
    """Return whether a plan says how large a buffer must be; else a smaller one is a plan of another model.

    It does so for messages, for parameters, optimizer state and reduced gradients, and for what another
    microbatch has too that is treated alike.
    """
    buffers, table = device.buffers, device.tasks
    if buffers.persistent[buffer]:
        known = {MemoryClass.PARAMETERS, MemoryClass.OPTIMIZER}
        reduced = set(table.bucket[np.isin(table.kind, list(REDUCTIONS))].tolist())
        owned = {n for n, bucket in enumerate(device.buckets) if bucket.kind != "tied"}
        return buffers.memory_class[buffer] in known | (
            {MemoryClass.GRADIENTS} if owned <= reduced else set()
        )
    moving = np.isin(table.kind, list(SEND_KINDS | RECV_KINDS | COLLECTIVE_KINDS))
    for number in np.flatnonzero(moving).tolist():
        if {*table.reads.row(number), *table.allocates.row(number)} == {buffer}:
            return True
    label, microbatch = int(buffers.owner[buffer]), int(buffers.microbatch[buffer])
    twins = set(buffers.microbatch[buffers.owner == label].tolist()) - {microbatch}
    return any(_treated_alike(plan, device, (microbatch, twin)) for twin in twins)


def _treated_alike(plan: Plan, device: DevicePlan, microbatches: tuple[int, int]) -> bool:
    """Return whether two microbatches have one size and the same passes and exchanges on a device."""
    if NONE in microbatches:
        return False
    table, sizes = device.tasks, plan.training.micro_batch_sizes
    passes = [
        sorted(
            zip(table.kind[rows].tolist(), table.stage[rows].tolist(), table.part[rows].tolist(), strict=True)
        )
        for rows in ((table.microbatch == one) & (table.bucket == NONE) for one in microbatches)
    ]
    return passes[0] == passes[1] and sizes[microbatches[0]] == sizes[microbatches[1]]

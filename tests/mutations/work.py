"""Work that is left out, done twice, or done for another microbatch or on other layers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

from simulator.plan import COLLECTIVE_KINDS, NONE, DevicePlan, Plan, Task, TaskKind
from tests.mutations.mutant import PASSES, K, Mutant, Mutation, anyone, places_of, shuffled
from tests.plan_edits import edited, name, tasks_of, twice, with_tasks, without


def wrong_microbatch(plan: Plan, choose: random.Random) -> Mutant | None:
    """Two passes of one stage say each other's microbatch: each takes the values of the other."""
    first = anyone(plan, choose, PASSES)
    if first is None:
        return None
    rank, one = first
    tasks = tasks_of(plan.device_plans[rank])
    alike = ("kind", "stage", "first_segment", "last_segment")
    same = [n for n, t in enumerate(tasks) if t.microbatch != tasks[one].microbatch
            and all(getattr(t, field) == getattr(tasks[one], field) for field in alike)]  # fmt: skip
    if not same:
        return None
    other = choose.choice(same)
    swapped = list(tasks)
    swapped[one] = replace(tasks[one], microbatch=tasks[other].microbatch)
    swapped[other] = replace(tasks[other], microbatch=tasks[one].microbatch)
    what = f"{name(plan, rank, one)} and {name(plan, rank, other)} say each other's microbatch"
    return Mutant(plan=with_tasks(plan, rank, swapped), what=what)


def drop(kinds: Iterable[TaskKind], accept: Callable[[Task], bool] = lambda task: True) -> Mutation:
    """Return the mutation that leaves one task out."""

    def mutation(plan: Plan, choose: random.Random) -> Mutant | None:
        for rank, number in shuffled(choose, places_of(plan, kinds)):
            tasks = tasks_of(plan.device_plans[rank])
            if accept(tasks[number]):
                what = f"{name(plan, rank, number)} left out"
                return Mutant(plan=with_tasks(plan, rank, without(tasks, {number})), what=what)
        return None

    return mutation


def double(kinds: Iterable[TaskKind], accept: Callable[[Task], bool] = lambda task: True) -> Mutation:
    """Return the mutation that does one task twice; collectives on all of their ranks, so that they meet."""

    def mutation(plan: Plan, choose: random.Random) -> Mutant | None:
        for rank, number in shuffled(choose, places_of(plan, kinds)):
            task = plan.device_plans[rank].tasks.task(number)
            if accept(task):
                what = f"{name(plan, rank, number)} done twice"
                for other in _meeting(plan, rank, task):
                    tasks = tasks_of(plan.device_plans[other[0]])
                    plan = with_tasks(plan, other[0], twice(tasks, other[1]))
                return Mutant(plan=plan, what=what)
        return None

    return mutation


def _meeting(plan: Plan, rank: int, task: Task) -> list[tuple[int, int]]:
    """Return where the members of a collective stand (its own place for other tasks): (rank, task)."""
    members = [rank] if task.group == NONE else list(plan.groups[task.group].pipeline_ranks)
    key = _key(plan.device_plans[rank], task)
    return [
        next((other, n) for n, t in enumerate(plan.device_plans[other].tasks)
             if _key(plan.device_plans[other], t) == key and (other != rank or t == task))
        for other in members
    ]  # fmt: skip


def _key(device: DevicePlan, task: Task) -> tuple[object, ...]:
    bucket = device.buckets[task.bucket].name if task.bucket != NONE else ""
    stage = NONE if task.kind in COLLECTIVE_KINDS and bucket else task.stage
    return (task.kind, stage, task.microbatch, task.part, task.phase, task.group, bucket)


def is_bucket(task: Task) -> bool:
    return task.bucket != NONE


def is_norm(task: Task) -> bool:
    return task.kind is K.NORM or (task.bucket == NONE and task.microbatch == NONE)


def is_gather_after_update(task: Task) -> bool:
    return task.bucket != NONE and task.microbatch == NONE


def drop_exchange(plan: Plan, choose: random.Random) -> Mutant | None:
    """A microbatch lacks an exchange of tensor, context or expert parallelism that others have."""
    for rank, number in shuffled(choose, places_of(plan, COLLECTIVE_KINDS)):
        device = plan.device_plans[rank]
        tasks = tasks_of(device)
        if _has_alike(plan, device, tasks[number]):
            what = f"{name(plan, rank, number)} left out"
            return Mutant(plan=with_tasks(plan, rank, without(tasks, {number})), what=what)
    return None


def double_exchange(plan: Plan, choose: random.Random) -> Mutant | None:
    """A microbatch is exchanged once more than others: what was summed is summed again."""
    for rank, number in shuffled(choose, places_of(plan, COLLECTIVE_KINDS)):
        device = plan.device_plans[rank]
        tasks = tasks_of(device)
        if _has_alike(plan, device, tasks[number]):
            what = f"{name(plan, rank, number)} done twice"
            return Mutant(plan=with_tasks(plan, rank, twice(tasks, number)), what=what)
    return None


def _has_alike(plan: Plan, device: DevicePlan, task: Task) -> bool:
    """Return whether a task is an exchange of a microbatch that other microbatches have too."""
    table = device.tasks
    same = [
        table.microbatch[n] for n, other in enumerate(device.tasks)
        if (other.kind, other.stage, other.group, other.phase, other.part)
        == (task.kind, task.stage, task.group, task.phase, task.part)
    ]  # fmt: skip
    return task.bucket == NONE != task.microbatch and len(set(same)) > 2


def drop_norm(plan: Plan, choose: random.Random) -> Mutant | None:
    """Gradients are clipped by another norm; over one rank there is nothing to sum."""
    kinds = {K.NORM} if plan.num_ranks == 1 else {K.NORM, K.ALL_REDUCE}
    return drop(kinds, is_norm)(plan, choose)


def drop_recompute(plan: Plan, choose: random.Random) -> Mutant | None:
    """A backward lacks activations that other microbatches of the same size make again.

    Where no other microbatch has that size, the plan is that of another model, which keeps enough.
    """
    sizes = plan.training.micro_batch_sizes

    def has_twin(task: Task) -> bool:
        return sizes.count(sizes[task.microbatch]) > 1

    return drop({K.R}, has_twin)(plan, choose)


def lose_microbatch(plan: Plan, choose: random.Random) -> Mutant | None:
    """No rank does anything for one microbatch, as if the batch had been smaller."""
    microbatch = choose.randrange(plan.training.num_microbatches)
    for device in plan.device_plans:
        tasks = tasks_of(device)
        gone = {number for number, task in enumerate(tasks) if task.microbatch == microbatch}
        plan = with_tasks(plan, device.pipeline_rank, without(tasks, gone))
    return Mutant(plan=plan, what=f"microbatch {microbatch} left out everywhere")


def lose_layer(plan: Plan, choose: random.Random) -> Mutant | None:
    """A pass leaves out the first or the last of its segments."""
    first = _wide(plan, choose)
    if first is None:
        return None
    rank, number = first
    task = plan.device_plans[rank].tasks.task(number)
    change = choose.choice(
        [{"first_segment": task.first_segment + 1}, {"last_segment": task.last_segment - 1}]
    )
    what = f"{name(plan, rank, number)} leaves out a segment: {change}"
    return Mutant(plan=edited(plan, rank, number, **change), what=what)


def _wide(plan: Plan, choose: random.Random) -> tuple[int, int] | None:
    places = [
        (rank, number)
        for rank, number in places_of(plan, PASSES)
        if plan.device_plans[rank].tasks.first_segment[number]
        < plan.device_plans[rank].tasks.last_segment[number]
    ]
    return choose.choice(places) if places else None


def repeat_layer(plan: Plan, choose: random.Random) -> Mutant | None:
    """A pass does a segment too many, which another pass, stage or rank does."""
    for rank, number in shuffled(choose, places_of(plan, PASSES)):
        task = plan.device_plans[rank].tasks.task(number)
        changes = [{"first_segment": task.first_segment - 1}] if task.first_segment > 0 else []
        if task.last_segment + 1 < len(plan.segments):
            changes.append({"last_segment": task.last_segment + 1})
        if changes:
            change = choose.choice(changes)
            what = f"{name(plan, rank, number)} does a segment too many: {change}"
            return Mutant(plan=edited(plan, rank, number, **change), what=what)
    return None

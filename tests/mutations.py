"""Ways to break a legal plan, each a true defect: `(plan, choose) -> Mutant`, or None where it has no place.

A mutant is wrong for a reason that is stated here and does not come from the checker: what a device must
order is written down once more, in `needs` and `cross_step_needs`, and an order is lost only when neither
streams nor waits keep it (`Order`, an exact search). Bookkeeping is kept right around the defect (a task
that goes takes its buffers along, those who waited for it wait for what it waited for), so that a mutant
is not found by its debris.

To add one: a function, and one line in `MUTATIONS`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from simulator.plan import (
    COLLECTIVE_KINDS,
    MATCHING_SEND,
    NONE,
    RECV_KINDS,
    SEND_KINDS,
    DevicePlan,
    MemoryClass,
    Plan,
    Task,
    TaskKind,
    TaskTable,
)
from tests.plan_edits import (
    BACKWARDS,
    LISTS,
    REDUCTIONS,
    Order,
    cross_step_needs,
    edited,
    name,
    needs,
    ordered_across_steps,
    reordered,
    tasks_of,
    twice,
    uses_of,
    with_device,
    with_tasks,
    without,
)

K = TaskKind
PASSES = {K.F, *BACKWARDS}
_COUNTERPART = {send: recv for recv, send in MATCHING_SEND.items()} | MATCHING_SEND


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A broken plan and what was done to it, as short as it can be said."""

    plan: Plan
    what: str


Mutation = Callable[[Plan, random.Random], "Mutant | None"]


def _anyone(plan: Plan, choose: random.Random, kinds: Iterable[TaskKind]) -> tuple[int, int] | None:
    """Return a random (rank, task) of these kinds."""
    wanted = [int(kind) for kind in kinds]
    places = [
        (device.pipeline_rank, int(number))
        for device in plan.device_plans
        for number in np.flatnonzero(np.isin(device.tasks.kind, wanted))
    ]
    return choose.choice(places) if places else None


def _shuffled(choose: random.Random, items: Iterable[object]) -> list:
    found = list(items)
    choose.shuffle(found)
    return found


def drop_wait(plan: Plan, choose: random.Random) -> Mutant | None:
    """An order that a device needs is kept by this wait alone."""
    for device in _shuffled(choose, plan.device_plans):
        tasks = tasks_of(device)
        pairs = needs(plan, device)
        waits = [(number, wait) for number, task in enumerate(tasks) for wait in task.waits]
        for number, wait in _shuffled(choose, waits):
            less = list(tasks)
            kept = tuple(other for other in tasks[number].waits if other != wait)
            less[number] = replace(tasks[number], waits=kept)
            if Order(less).loses(pairs):
                rank = device.pipeline_rank
                what = f"{name(plan, rank, number)} does not wait for {name(plan, rank, wait)}"
                return Mutant(plan=with_tasks(plan, rank, less), what=what)
    return None


def drop_wait_across_steps(plan: Plan, choose: random.Random) -> Mutant | None:
    """The next step may read parameters that are not written yet."""
    for device in _shuffled(choose, plan.device_plans):
        tasks = tasks_of(device)
        order, pairs = Order(tasks), cross_step_needs(plan, device)
        waiting = [number for number, task in enumerate(tasks) if task.previous_step_waits]
        for number in _shuffled(choose, waiting):
            less = list(tasks)
            less[number] = replace(tasks[number], previous_step_waits=())
            if not all(ordered_across_steps(less, order, pair) for pair in pairs):
                rank = device.pipeline_rank
                what = f"{name(plan, rank, number)} does not wait for the step before"
                return Mutant(plan=with_tasks(plan, rank, less), what=what)
    return None


def other_stream(plan: Plan, choose: random.Random) -> Mutant | None:
    """On a stream of its own a task no longer follows what it needs, or is no longer followed by it."""
    for device in _shuffled(choose, plan.device_plans):
        tasks = tasks_of(device)
        pairs = needs(plan, device)
        streams = (*device.streams, "astray")
        for number in _shuffled(choose, range(len(tasks))):
            moved = list(tasks)
            moved[number] = replace(tasks[number], stream=len(device.streams))
            if Order(moved).loses(pairs):
                rank = device.pipeline_rank
                changed = replace(device, streams=streams, tasks=TaskTable.from_tasks(moved))
                what = f"{name(plan, rank, number)} on a stream of its own"
                return Mutant(plan=with_device(plan, changed), what=what)
    return None


def swap_sends(plan: Plan, choose: random.Random) -> Mutant | None:
    """Two messages of one channel leave in an order in which they are not received."""
    return _swap_ends(plan, choose, SEND_KINDS)


def swap_receives(plan: Plan, choose: random.Random) -> Mutant | None:
    """Two messages of one channel are received in an order in which they are not sent."""
    return _swap_ends(plan, choose, RECV_KINDS)


def _swap_ends(plan: Plan, choose: random.Random, kinds: Iterable[TaskKind]) -> Mutant | None:
    for device in _shuffled(choose, plan.device_plans):
        tasks = tasks_of(device)
        ends = [number for number, task in enumerate(tasks) if task.kind in kinds]
        for one, other in _shuffled(choose, combinations(ends, 2)):
            mine = {(tasks[n].stream, tasks[n].peer) for n in (one, other)}
            theirs = {_other_stream(plan, device.pipeline_rank, tasks[n]) for n in (one, other)}
            if len(mine) == len(theirs) == 1:
                order = list(range(len(tasks)))
                order[one], order[other] = other, one
                rank = device.pipeline_rank
                what = f"{name(plan, rank, one)} and {name(plan, rank, other)} swapped"
                return Mutant(plan=with_tasks(plan, rank, reordered(tasks, order)), what=what)
    return None


def _other_stream(plan: Plan, rank: int, task: Task) -> int:
    """Return the stream of the other end of a transfer."""
    table = plan.device_plans[task.peer].tasks
    wanted = (_COUNTERPART[task.kind], rank, task.edge, task.microbatch)
    columns = (table.kind, table.peer, table.edge, table.microbatch)
    met = np.all([column == value for column, value in zip(columns, wanted, strict=True)], axis=0)
    return int(table.stream[np.flatnonzero(met)[0]])


def swap_collectives(plan: Plan, choose: random.Random) -> Mutant | None:
    """Two ranks issue the collectives that they share in different orders."""
    spans = {n: set(group.pipeline_ranks) for n, group in enumerate(plan.groups)}
    for device in _shuffled(choose, plan.device_plans):
        tasks, rank = tasks_of(device), device.pipeline_rank
        found = [n for n, task in enumerate(tasks) if task.kind in COLLECTIVE_KINDS]
        for one, other in _shuffled(choose, combinations(found, 2)):
            shared = spans[tasks[one].group] & spans[tasks[other].group] - {rank}
            same = all(getattr(tasks[one], field) == getattr(tasks[other], field) for field in _IDENTITY)
            if shared and not same:
                what = f"{name(plan, rank, one)} and {name(plan, rank, other)} swapped on one rank"
                return Mutant(plan=with_tasks(plan, rank, _exchanged(tasks, one, other)), what=what)
    return None


_IDENTITY = ("kind", "stage", "microbatch", "part", "phase", "group", "bucket", "size_bytes")
"""What a collective is; two tasks that swap these keep their places, waits and streams."""


def _exchanged(tasks: Sequence[Task], one: int, other: int, more: Sequence[str] = ()) -> list[Task]:
    swapped = list(tasks)
    for here, there in ((one, other), (other, one)):
        fields = {field: getattr(tasks[there], field) for field in (*_IDENTITY, *more)}
        swapped[here] = replace(tasks[here], **fields)
    return swapped


def backward_before_forward(plan: Plan, choose: random.Random) -> Mutant | None:
    """A backward runs where the forward of its microbatch stood, and that one in its place."""
    first = _anyone(plan, choose, {K.F})
    if first is None:
        return None
    rank, forward = first
    tasks = tasks_of(plan.device_plans[rank])
    same = [n for n, t in enumerate(tasks) if t.kind in BACKWARDS
            and (t.stage, t.microbatch) == (tasks[forward].stage, tasks[forward].microbatch)]  # fmt: skip
    if not same:
        return None
    other = choose.choice(same)
    more = ("first_segment", "last_segment", "work", *LISTS)
    what = f"{name(plan, rank, forward)} and {name(plan, rank, other)} swapped"
    return Mutant(plan=with_tasks(plan, rank, _exchanged(tasks, forward, other, more)), what=what)


def wrong_microbatch(plan: Plan, choose: random.Random) -> Mutant | None:
    """Two passes of one stage say each other's microbatch: each takes the values of the other."""
    first = _anyone(plan, choose, PASSES)
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


def _drop(kinds: Iterable[TaskKind], accept: Callable[[Task], bool] = lambda task: True) -> Mutation:
    """Return the mutation that leaves one task out."""

    def mutation(plan: Plan, choose: random.Random) -> Mutant | None:
        for rank, number in _shuffled(choose, _places(plan, kinds)):
            tasks = tasks_of(plan.device_plans[rank])
            if accept(tasks[number]):
                what = f"{name(plan, rank, number)} left out"
                return Mutant(plan=with_tasks(plan, rank, without(tasks, {number})), what=what)
        return None

    return mutation


def _has_alike(plan: Plan, device: DevicePlan, task: Task) -> bool:
    """Return whether a task is an exchange of a microbatch that other microbatches have too."""
    table = device.tasks
    same = [
        table.microbatch[n] for n, other in enumerate(device.tasks)
        if (other.kind, other.stage, other.group, other.phase, other.part)
        == (task.kind, task.stage, task.group, task.phase, task.part)
    ]  # fmt: skip
    return task.bucket == NONE != task.microbatch and len(set(same)) > 2


def drop_exchange(plan: Plan, choose: random.Random) -> Mutant | None:
    """A microbatch lacks an exchange of tensor, context or expert parallelism that others have."""
    for rank, number in _shuffled(choose, _places(plan, COLLECTIVE_KINDS)):
        device = plan.device_plans[rank]
        tasks = tasks_of(device)
        if _has_alike(plan, device, tasks[number]):
            what = f"{name(plan, rank, number)} left out"
            return Mutant(plan=with_tasks(plan, rank, without(tasks, {number})), what=what)
    return None


def double_exchange(plan: Plan, choose: random.Random) -> Mutant | None:
    """A microbatch is exchanged once more than others: what was summed is summed again."""
    for rank, number in _shuffled(choose, _places(plan, COLLECTIVE_KINDS)):
        device = plan.device_plans[rank]
        tasks = tasks_of(device)
        if _has_alike(plan, device, tasks[number]):
            what = f"{name(plan, rank, number)} done twice"
            return Mutant(plan=with_tasks(plan, rank, twice(tasks, number)), what=what)
    return None


def drop_regrouping(plan: Plan, choose: random.Random) -> Mutant | None:
    """No microbatch is regrouped: ranks go on with samples or tokens of others."""
    places = [
        (rank, task.stage, task.phase)
        for rank, number in _places(plan, COLLECTIVE_KINDS)
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


def drop_norm(plan: Plan, choose: random.Random) -> Mutant | None:
    """Gradients are clipped by another norm; over one rank there is nothing to sum."""
    kinds = {K.NORM} if plan.num_ranks == 1 else {K.NORM, K.ALL_REDUCE}
    return _drop(kinds, _is_norm)(plan, choose)


def drop_recompute(plan: Plan, choose: random.Random) -> Mutant | None:
    """A backward lacks activations that other microbatches of the same size make again.

    Where no other microbatch has that size, the plan is that of another model, which keeps enough.
    """
    sizes = plan.training.micro_batch_sizes

    def has_twin(task: Task) -> bool:
        return sizes.count(sizes[task.microbatch]) > 1

    return _drop({K.R}, has_twin)(plan, choose)


def _double(kinds: Iterable[TaskKind], accept: Callable[[Task], bool] = lambda task: True) -> Mutation:
    """Return the mutation that does one task twice; collectives on all of their ranks, so that they meet."""

    def mutation(plan: Plan, choose: random.Random) -> Mutant | None:
        for rank, number in _shuffled(choose, _places(plan, kinds)):
            task = plan.device_plans[rank].tasks.task(number)
            if accept(task):
                what = f"{name(plan, rank, number)} done twice"
                for other in _meeting(plan, rank, task):
                    tasks = tasks_of(plan.device_plans[other[0]])
                    plan = with_tasks(plan, other[0], twice(tasks, other[1]))
                return Mutant(plan=plan, what=what)
        return None

    return mutation


def _places(plan: Plan, kinds: Iterable[TaskKind]) -> list[tuple[int, int]]:
    wanted = set(kinds)
    return [
        (device.pipeline_rank, number)
        for device in plan.device_plans
        for number, kind in enumerate(device.tasks.kind.tolist())
        if kind in wanted
    ]


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


def _is_bucket(task: Task) -> bool:
    return task.bucket != NONE


def _is_norm(task: Task) -> bool:
    return task.kind is K.NORM or (task.bucket == NONE and task.microbatch == NONE)


def _is_gather_after_update(task: Task) -> bool:
    return task.bucket != NONE and task.microbatch == NONE


def drop_transfer(plan: Plan, choose: random.Random) -> Mutant | None:
    """A value never travels: neither end of its transfer is listed."""
    first = _anyone(plan, choose, SEND_KINDS)
    if first is None:
        return None
    rank, number = first
    what = f"{name(plan, rank, number)} and its receive left out"
    for place, one in _ends(plan, rank, number):
        plan = with_tasks(plan, place, without(tasks_of(plan.device_plans[place]), {one}))
    return Mutant(plan=plan, what=what)


def _ends(plan: Plan, rank: int, number: int) -> list[tuple[int, int]]:
    """Return both ends of a transfer: (rank, task)."""
    task = plan.device_plans[rank].tasks.task(number)
    other = next(
        n for n, t in enumerate(plan.device_plans[task.peer].tasks)
        if (t.kind, t.peer, t.edge, t.microbatch)
        == (_COUNTERPART[task.kind], rank, task.edge, task.microbatch)
    )  # fmt: skip
    return [(rank, number), (task.peer, other)]


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
        for rank, number in _places(plan, PASSES)
        if plan.device_plans[rank].tasks.first_segment[number]
        < plan.device_plans[rank].tasks.last_segment[number]
    ]
    return choose.choice(places) if places else None


def repeat_layer(plan: Plan, choose: random.Random) -> Mutant | None:
    """A pass does a segment too many, which another pass, stage or rank does."""
    for rank, number in _shuffled(choose, _places(plan, PASSES)):
        task = plan.device_plans[rank].tasks.task(number)
        changes = [{"first_segment": task.first_segment - 1}] if task.first_segment > 0 else []
        if task.last_segment + 1 < len(plan.segments):
            changes.append({"last_segment": task.last_segment + 1})
        if changes:
            change = choose.choice(changes)
            what = f"{name(plan, rank, number)} does a segment too many: {change}"
            return Mutant(plan=edited(plan, rank, number, **change), what=what)
    return None


def wrong_peer(plan: Plan, choose: random.Random) -> Mutant | None:
    """A transfer names a rank that does not take part in it."""
    first = _anyone(plan, choose, SEND_KINDS | RECV_KINDS)
    if first is None or plan.num_pipeline_ranks < 3:
        return None
    rank, number = first
    task = plan.device_plans[rank].tasks.task(number)
    others = [peer for peer in range(plan.num_pipeline_ranks) if peer not in {rank, task.peer}]
    peer = choose.choice(others)
    what = f"{name(plan, rank, number)} has peer {peer} instead of {task.peer}"
    return Mutant(plan=edited(plan, rank, number, peer=peer), what=what)


def wrong_edge(plan: Plan, choose: random.Random) -> Mutant | None:
    """A transfer says that it carries the tensors between two other stages."""
    first = _anyone(plan, choose, SEND_KINDS | RECV_KINDS)
    if first is None or len(plan.edges) < 2:
        return None
    rank, number = first
    task = plan.device_plans[rank].tasks.task(number)
    edge = choose.choice([other for other in range(len(plan.edges)) if other != task.edge])
    what = f"{name(plan, rank, number)} carries edge {edge} instead of {task.edge}"
    return Mutant(plan=edited(plan, rank, number, edge=edge), what=what)


def wrong_transfer_microbatch(plan: Plan, choose: random.Random) -> Mutant | None:
    """Both ends of two transfers of a channel say each other's microbatch: values are swapped."""
    for rank, one in _shuffled(choose, _places(plan, SEND_KINDS)):
        task = plan.device_plans[rank].tasks.task(one)
        same = [
            n for n, t in enumerate(plan.device_plans[rank].tasks)
            if (t.kind, t.edge, t.stream) == (task.kind, task.edge, task.stream)
            and t.microbatch != task.microbatch
        ]  # fmt: skip
        if same:
            other = choose.choice(same)
            what = f"{name(plan, rank, one)} and {name(plan, rank, other)} say each other's microbatch"
            numbers = [plan.device_plans[rank].tasks.task(n).microbatch for n in (one, other)]
            places = [_ends(plan, rank, n) for n in (one, other)]
            for ends, microbatch in zip(places, numbers[::-1], strict=True):
                for place, number in ends:
                    plan = edited(plan, place, number, microbatch=microbatch)
            return Mutant(plan=plan, what=what)
    return None


def wrong_size_at_one_end(plan: Plan, choose: random.Random) -> Mutant | None:
    """Two ends of a transfer disagree about its shape or dtype."""
    first = _anyone(plan, choose, SEND_KINDS | RECV_KINDS)
    if first is None:
        return None
    rank, number = first
    size = int(plan.device_plans[rank].tasks.size_bytes[number])
    wrong = choose.choice([size // 2, size * 2, size - 1])
    what = f"{name(plan, rank, number)} moves {wrong} instead of {size} bytes"
    return Mutant(plan=edited(plan, rank, number, size_bytes=wrong), what=what)


def wrong_size_at_both_ends(plan: Plan, choose: random.Random) -> Mutant | None:
    """Both ends of a transfer move less than the tensors between the stages have."""
    first = _anyone(plan, choose, SEND_KINDS)
    if first is None:
        return None
    rank, number = first
    size = int(plan.device_plans[rank].tasks.size_bytes[number])
    wrong = choose.choice([size - 1, size * 3 // 4])
    what = f"{name(plan, rank, number)} and its receive move {wrong} instead of {size} bytes"
    for place, one in _ends(plan, rank, number):
        plan = edited(plan, place, one, size_bytes=wrong)
    return Mutant(plan=plan, what=what)


def wrong_tensor(plan: Plan, choose: random.Random) -> Mutant | None:
    """A tensor that crosses ranks has another shape or dtype than its transfers move."""
    values = [value for edge in plan.edges for value in edge.values]
    if not values:
        return None
    number, output = choose.choice(values)
    segment = plan.segments[number]
    spec = segment.outputs[output]
    dtype = "bf16" if spec.dtype == "fp32" else "fp32"
    wider = (*spec.shape[:-1], spec.shape[-1] + 1)
    changed = choose.choice([replace(spec, dtype=dtype), replace(spec, shape=wider)])
    outputs = tuple(changed if place == output else one for place, one in enumerate(segment.outputs))
    segments = list(plan.segments)
    segments[number] = replace(segment, outputs=outputs)
    what = f"output {output} of segment {number} is {changed.dtype}{list(changed.shape)}"
    return Mutant(plan=replace(plan, segments=tuple(segments)), what=what)


def free_early(plan: Plan, choose: random.Random) -> Mutant | None:
    """A buffer is freed by an earlier user; a later one surely or possibly reads it after that."""
    for device in _shuffled(choose, plan.device_plans):
        tasks, rank = tasks_of(device), device.pipeline_rank
        order = Order(tasks)
        uses = uses_of(device, tasks)
        for buffer in _shuffled(choose, uses):
            makers, readers, enders = uses[buffer]
            for early in _shuffled(choose, {*makers, *readers} - set(enders)):
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
    for device in _shuffled(choose, plan.device_plans):
        tasks, rank = tasks_of(device), device.pipeline_rank
        for number in _shuffled(choose, [n for n, task in enumerate(tasks) if task.frees]):
            later = [n for n in range(number + 1, len(tasks)) if tasks[n].stream == tasks[number].stream]
            if later:
                again, buffer = choose.choice(later), choose.choice(tasks[number].frees)
                what = f"{name(plan, rank, again)} frees again what {name(plan, rank, number)} freed"
                return Mutant(plan=edited(plan, rank, again, frees=(*tasks[again].frees, buffer)), what=what)
    return None


def shrink_buffer(plan: Plan, choose: random.Random) -> Mutant | None:
    """A buffer is smaller than what the plan says is put there, or than that of an equal task."""
    device = choose.choice(plan.device_plans)
    for buffer in _shuffled(choose, range(len(device.buffers.size_bytes))):
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


def reduce_wrong_bucket(plan: Plan, choose: random.Random) -> Mutant | None:
    """A collective or an update works on another bucket: one is left out, one is done twice."""
    kinds = REDUCTIONS | {K.UPDATE, K.ALL_GATHER}
    for rank, number in _shuffled(choose, _places(plan, kinds)):
        device = plan.device_plans[rank]
        bucket = int(device.tasks.bucket[number])
        others = [n for n in range(len(device.buckets)) if n != bucket]
        if bucket != NONE and others:
            other = choose.choice(others)
            what = f"{name(plan, rank, number)} works on bucket {device.buckets[other].name}"
            return Mutant(plan=edited(plan, rank, number, bucket=other), what=what)
    return None


def parameter_in_no_bucket(plan: Plan, choose: random.Random) -> Mutant | None:
    """A trained parameter is neither reduced nor updated."""
    return _edit_bucket(plan, choose, add=False)


def parameter_in_two_buckets(plan: Plan, choose: random.Random) -> Mutant | None:
    """A trained parameter is updated by two buckets."""
    return _edit_bucket(plan, choose, add=True)


def _edit_bucket(plan: Plan, choose: random.Random, *, add: bool) -> Mutant | None:
    for device in _shuffled(choose, plan.device_plans):
        dense = [n for n, bucket in enumerate(device.buckets) if bucket.kind != "tied" and bucket.parameters]
        for one in _shuffled(choose, dense):
            parameter = choose.choice(device.buckets[one].parameters)
            others = [n for n in dense if n != one]
            if add and not others:
                continue
            place = choose.choice(others) if add else one
            names = device.buckets[place].parameters
            changed = (*names, parameter) if add else tuple(n for n in names if n != parameter)
            buckets = list(device.buckets)
            buckets[place] = replace(buckets[place], parameters=changed)
            what = (
                f"rank {device.pipeline_rank}: bucket {buckets[place].name} "
                f"{'has' if add else 'lacks'} {parameter}"
            )
            return Mutant(plan=with_device(plan, replace(device, buckets=tuple(buckets))), what=what)
    return None


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


def wait_in_a_circle(plan: Plan, choose: random.Random) -> Mutant | None:
    """A task waits for one that waits for it."""
    for device in _shuffled(choose, plan.device_plans):
        tasks, rank = tasks_of(device), device.pipeline_rank
        order = Order(tasks)
        pairs = [(a, b) for b in range(len(tasks)) for a in range(b) if order.has(a, b)]
        if pairs:
            first, second = choose.choice(pairs)
            waits = (*tasks[first].waits, second)
            what = f"{name(plan, rank, first)} waits for {name(plan, rank, second)}, which follows it"
            return Mutant(plan=edited(plan, rank, first, waits=waits), what=what)
    return None


def wait_for_the_answer(plan: Plan, choose: random.Random) -> Mutant | None:
    """A forward is sent only after the gradient of what it sends has come back."""
    for rank, number in _shuffled(choose, _places(plan, {K.SEND_F})):
        tasks = tasks_of(plan.device_plans[rank])
        task = tasks[number]
        back = [n for n, t in enumerate(tasks) if t.kind is K.RECV_B
                and (t.edge, t.microbatch) == (task.edge, task.microbatch)]  # fmt: skip
        if back:
            what = f"{name(plan, rank, number)} waits for {name(plan, rank, back[0])}, its answer"
            return Mutant(plan=edited(plan, rank, number, waits=(*task.waits, back[0])), what=what)
    return None


MUTATIONS: dict[str, Mutation] = {
    "drop wait": drop_wait,
    "drop wait across steps": drop_wait_across_steps,
    "other stream": other_stream,
    "swap sends": swap_sends,
    "swap receives": swap_receives,
    "swap collectives": swap_collectives,
    "backward before forward": backward_before_forward,
    "wrong microbatch": wrong_microbatch,
    "drop pass": _drop(PASSES),
    "drop recompute": drop_recompute,
    "drop send": _drop(SEND_KINDS),
    "drop receive": _drop(RECV_KINDS),
    "drop transfer": drop_transfer,
    "drop reduction": _drop(REDUCTIONS, _is_bucket),
    "drop exchange": drop_exchange,
    "drop regrouping": drop_regrouping,
    "drop norm": drop_norm,
    "drop update": _drop({K.UPDATE}),
    "drop gather": _drop({K.ALL_GATHER}, _is_gather_after_update),
    "double pass": _double(PASSES),
    "double recompute": _double({K.R}),
    "double transfer": _double(SEND_KINDS | RECV_KINDS),
    "double reduction": _double(REDUCTIONS, _is_bucket),
    "double exchange": double_exchange,
    "double norm": _double({K.NORM, K.ALL_REDUCE}, _is_norm),
    "double update": _double({K.UPDATE}),
    "lose microbatch": lose_microbatch,
    "lose layer": lose_layer,
    "repeat layer": repeat_layer,
    "wrong peer": wrong_peer,
    "wrong edge": wrong_edge,
    "wrong microbatch of transfers": wrong_transfer_microbatch,
    "wrong size at one end": wrong_size_at_one_end,
    "wrong size at both ends": wrong_size_at_both_ends,
    "wrong tensor": wrong_tensor,
    "free early": free_early,
    "never free": never_free,
    "never allocate": never_allocate,
    "free twice": free_twice,
    "shrink buffer": shrink_buffer,
    "wrong bucket": reduce_wrong_bucket,
    "parameter in no bucket": parameter_in_no_bucket,
    "parameter in two buckets": parameter_in_two_buckets,
    "replicas apart": replicas_apart,
    "experts apart": experts_apart,
    "ranks apart": ranks_apart,
    "wait in a circle": wait_in_a_circle,
    "wait for the answer": wait_for_the_answer,
}

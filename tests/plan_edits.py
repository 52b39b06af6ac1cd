"""Plans taken apart and put together again, and what a device must order: for tests that break plans.

[Note: an order that is kept]
On one device a task surely completes before another starts when streams and waits say so, directly or
not (`Order`, an exact search). `needs` and `cross_step_needs` write down what must be ordered, apart from
the checker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from simulator.plan import NONE, Bucket, DevicePlan, Plan, Task, TaskKind, TaskTable

K = TaskKind
BACKWARDS = {K.B, K.BI, K.BW}
REDUCTIONS = {K.ALL_REDUCE, K.REDUCE_SCATTER}
WHOLE_BETWEEN_STEPS = {1, 2}
"""ZeRO levels that cut state but keep whole parameters, gathered after the update."""
LISTS = ("allocates", "reads", "frees")
Pair = tuple[int, int]


class Order:
    """What surely happens before what on one device whose waits go backwards in dispatch order.

    `done[t]` has bit w set when task w has completed before t starts.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.done: list[int] = []
        last: dict[int, int] = {}
        for number, task in enumerate(tasks):
            before = 0
            for wait in (*task.waits, *((last[task.stream],) if task.stream in last else ())):
                assert wait < number
                before |= self.done[wait] | 1 << wait
            self.done.append(before)
            last[task.stream] = number

    def has(self, first: int, second: int) -> bool:
        return bool(self.done[second] >> first & 1)

    def loses(self, pairs: Iterable[Pair]) -> bool:
        return any(not self.has(first, second) for first, second in pairs)


def tasks_of(device: DevicePlan) -> list[Task]:
    return list(device.tasks)


def needs(plan: Plan, device: DevicePlan) -> list[Pair]:
    """Return (giver, taker) pairs that a device must order.

    A temporary buffer: allocate, then every use, then free. Gradients: backward passes, sums over pipeline
    ranks, over shards, over their copies, norm, its sum, update, gather, each of what it uses.
    """
    tasks = tasks_of(device)
    pairs: set[Pair] = set()
    for makers, readers, enders in uses_of(device, tasks).values():
        pairs |= {(a, b) for a in makers for b in (*readers, *enders) if a != b}
        pairs |= {(a, b) for a in readers for b in enders if a != b}
    return [*pairs, *_ending(plan, device, tasks)]


def uses_of(device: DevicePlan, tasks: Sequence[Task]) -> dict[int, tuple[list[int], list[int], list[int]]]:
    persistent = device.buffers.persistent
    found: dict[int, tuple[list[int], list[int], list[int]]] = {}
    for number, task in enumerate(tasks):
        for place, name in enumerate(LISTS):
            for buffer in getattr(task, name):
                if not persistent[buffer]:
                    found.setdefault(buffer, ([], [], []))[place].append(number)
    return found


def _ending(plan: Plan, device: DevicePlan, tasks: Sequence[Task]) -> Iterable[Pair]:
    norms = _of(tasks, {K.NORM})
    summed = [n for n in _of(tasks, {K.ALL_REDUCE}, NONE) if tasks[n].microbatch == NONE]
    updates = _of(tasks, {K.UPDATE})
    for number, bucket in enumerate(device.buckets):
        own = _of(tasks, {K.UPDATE}, number)
        givers = _users(plan, tasks, bucket, {K.B, K.BW})
        yield from _reducing(device, tasks, (givers, _of(tasks, REDUCTIONS, number)))
        givers += _of(tasks, REDUCTIONS, number)
        for other, tied in enumerate(device.buckets):
            if tied.kind == "tied" != bucket.kind and not set(tied.parameters).isdisjoint(bucket.parameters):
                givers += _of(tasks, REDUCTIONS, other)
        yield from ((giver, taker) for giver in givers for taker in (*norms, *own))
        if bucket.zero in WHOLE_BETWEEN_STEPS and bucket.shard_count > 1:
            yield from ((update, gather) for update in own for gather in _of(tasks, {K.ALL_GATHER}, number))
    yield from ((norm, total) for norm in norms for total in summed)
    yield from ((one, update) for one in (*norms, *summed) for update in updates)


def _of(tasks: Sequence[Task], kinds: set[TaskKind], bucket: int | None = None) -> list[int]:
    return [n for n, t in enumerate(tasks) if t.kind in kinds and bucket in {None, t.bucket}]


def _users(plan: Plan, tasks: Sequence[Task], bucket: Bucket, kinds: set[TaskKind]) -> list[int]:
    """Return the passes of some kinds that use a bucket's parameters."""
    names = set(bucket.parameters)
    segments = {n for n, one in enumerate(plan.segments) if not names.isdisjoint(one.parameters)}
    return [
        n for n in _of(tasks, kinds)
        if not segments.isdisjoint(range(tasks[n].first_segment, tasks[n].last_segment + 1))
    ]  # fmt: skip


def _reducing(device: DevicePlan, tasks: Sequence[Task], ends: tuple[list[int], list[int]]) -> Iterable[Pair]:
    """Yield what the sums of a bucket take, group by group, where no temporary buffer says it."""
    givers, reductions = ends
    for group in dict.fromkeys(tasks[n].group for n in reductions):
        level = [n for n in reductions if tasks[n].group == group]
        if all(device.buffers.persistent[buffer] for n in level for buffer in tasks[n].reads):
            yield from (
                (giver, taker)
                for giver in givers
                for taker in level
                if len(level) == 1 or tasks[taker].microbatch == tasks[giver].microbatch
            )
        givers = level


def cross_step_needs(plan: Plan, device: DevicePlan) -> list[Pair]:
    """Return (writer of parameters in one step, task that reads them in the next)."""
    found: list[Pair] = []
    tasks = tasks_of(device)
    for number, bucket in enumerate(device.buckets):
        writers, gathers = _of(tasks, {K.UPDATE}, number), _of(tasks, {K.ALL_GATHER}, number)
        readers = _users(plan, tasks, bucket, {K.F})
        if bucket.shard_count > 1 and bucket.zero:
            writers, readers = (
                (gathers, readers) if bucket.zero in WHOLE_BETWEEN_STEPS else (writers, gathers)
            )
        found += [(writer, reader) for writer in writers for reader in readers]
    return found


def ordered_across_steps(tasks: Sequence[Task], order: Order, pair: Pair) -> bool:
    """Return whether a task of one step surely completes before one of the next starts."""
    writer, reader = pair
    after = {n for n in range(len(tasks)) if n == writer or order.has(writer, n)}
    before = {n for n in range(len(tasks)) if n == reader or order.has(n, reader)}
    if not {tasks[n].stream for n in after}.isdisjoint(tasks[n].stream for n in before):
        return True
    return any(not after.isdisjoint(tasks[n].previous_step_waits) for n in before)


def with_device(plan: Plan, device: DevicePlan) -> Plan:
    devices = list(plan.device_plans)
    devices[device.pipeline_rank] = device
    return replace(plan, device_plans=tuple(devices))


def with_tasks(plan: Plan, rank: int, tasks: Sequence[Task]) -> Plan:
    return with_device(plan, replace(plan.device_plans[rank], tasks=TaskTable.from_tasks(tasks)))


def edited(plan: Plan, rank: int, number: int, **fields: object) -> Plan:
    tasks = tasks_of(plan.device_plans[rank])
    tasks[number] = replace(tasks[number], **fields)
    return with_tasks(plan, rank, tasks)


def name(plan: Plan, rank: int, number: int) -> str:
    return f"rank {rank}: {plan.device_plans[rank].codes()[number]}"


def without(tasks: Sequence[Task], gone: set[int]) -> list[Task]:
    """Return tasks without some, whose buffers go too; what they would free, a neighbour frees.

    Those who waited for one that is gone, wait for what it waited for.
    """
    lost = {buffer for number in gone for buffer in tasks[number].allocates}
    frees: dict[int, list[int]] = {}
    for number in gone:
        heir = _neighbour(tasks, number, gone)
        if heir is not None:
            frees.setdefault(heir, []).extend(tasks[number].frees)
    kept = [number for number in range(len(tasks)) if number not in gone]
    position = {old: new for new, old in enumerate(kept)}
    result = []
    for number in kept:
        task = tasks[number]
        lists = {column: [b for b in getattr(task, column) if b not in lost] for column in LISTS}
        lists["frees"] += [b for b in frees.get(number, ()) if b not in lost]
        waits = {position[w] for wait in task.waits for w in _instead(tasks, wait, gone)}
        past = {position[w] for wait in task.previous_step_waits for w in _instead(tasks, wait, gone)}
        result.append(
            replace(
                task,
                waits=tuple(sorted(waits)),
                previous_step_waits=tuple(sorted(past)),
                **{column: tuple(values) for column, values in lists.items()},
            )
        )
    return result


def _neighbour(tasks: Sequence[Task], number: int, gone: set[int]) -> int | None:
    same = [n for n, t in enumerate(tasks) if t.stream == tasks[number].stream and n not in gone]
    return min(same, key=lambda n: (n < number, abs(n - number)), default=None)


def _instead(tasks: Sequence[Task], wait: int, gone: set[int]) -> set[int]:
    """Return what to wait for in place of `wait`: the tasks that stay of those it waited for itself."""
    seen, front = {wait}, [wait]
    for task in front:
        if task in gone:
            front += [before for before in tasks[task].waits if before not in seen]
            seen.update(tasks[task].waits)
    return seen - gone


def reordered(tasks: Sequence[Task], order: Sequence[int]) -> list[Task]:
    """Return tasks in another dispatch order; waits follow the tasks. A number may stand twice."""
    position: dict[int, int] = {}
    for new, old in enumerate(order):
        position.setdefault(old, new)
    return [
        replace(
            tasks[old],
            waits=tuple(position[wait] for wait in tasks[old].waits),
            previous_step_waits=tuple(position[wait] for wait in tasks[old].previous_step_waits),
        )
        for old in order
    ]


def twice(tasks: Sequence[Task], number: int) -> list[Task]:
    """Return tasks with one done once more right behind, on the same buffers, of which it makes none."""
    order = [*range(number + 1), *range(number, len(tasks))]
    result = reordered(tasks, order)
    original = tasks[number]
    again = tuple(b for b in original.reads if b not in original.frees)
    result[number + 1] = replace(result[number + 1], allocates=(), frees=(), reads=again)
    return result

"""Plans taken apart and put together again, and what a device must order: for tests that break plans.

[Note: an order that is kept]
On one device a task surely completes before another starts when streams and waits say so, directly or
not (`Order`, an exact search). `needs` and `cross_step_needs` write down what must be ordered, apart from
the checker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from simulator.plan import NONE, DevicePlan, Plan, Task, TaskKind, TaskTable

K = TaskKind
BACKWARDS = {K.B, K.BI, K.BW}
REDUCTIONS = {K.ALL_REDUCE, K.REDUCE_SCATTER}
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


def needs(device: DevicePlan, tasks: Sequence[Task]) -> list[Pair]:
    """Return (giver, taker) pairs that a device must order.

    A temporary buffer: allocate, then every use, then free. The end of the step: backward passes, sums over
    pipeline ranks, sums over replicas, norm, its sum, update, gather, each of what it uses.
    """
    pairs: set[Pair] = set()
    for makers, readers, enders in uses_of(device, tasks).values():
        pairs |= {(a, b) for a in makers for b in (*readers, *enders) if a != b}
        pairs |= {(a, b) for a in readers for b in enders if a != b}
    return [*pairs, *_ending(device, tasks)]


def uses_of(device: DevicePlan, tasks: Sequence[Task]) -> dict[int, tuple[list[int], list[int], list[int]]]:
    persistent = device.buffers.persistent
    found: dict[int, tuple[list[int], list[int], list[int]]] = {}
    for number, task in enumerate(tasks):
        for place, name in enumerate(LISTS):
            for buffer in getattr(task, name):
                if not persistent[buffer]:
                    found.setdefault(buffer, ([], [], []))[place].append(number)
    return found


def _ending(device: DevicePlan, tasks: Sequence[Task]) -> Iterable[Pair]:
    def of(kinds: set[TaskKind], bucket: int | None = None) -> list[int]:
        return [n for n, t in enumerate(tasks) if t.kind in kinds and bucket in {None, t.bucket}]

    def holds(one: int, other: int) -> bool:
        mine, theirs = (set(device.buckets[number].parameters) for number in (one, other))
        return not mine.isdisjoint(theirs)

    norms, summed = of({K.NORM}), [n for n in of({K.ALL_REDUCE}, NONE) if tasks[n].microbatch == NONE]
    updates = of({K.UPDATE})
    for number, bucket in enumerate(device.buckets):
        reductions = of(REDUCTIONS, number)
        last = [n for n in of(BACKWARDS) if tasks[n].stage == bucket.stage]
        tied = [n for other in range(len(device.buckets)) if other != number and holds(number, other)
                for n in of(REDUCTIONS, other)]  # fmt: skip
        stepwise = all(tasks[n].microbatch == NONE for n in reductions)
        for giver in (*last, *reductions, *(tied if bucket.kind != "tied" else ())):
            for taker in (*norms, *of({K.UPDATE}, number)):
                yield giver, taker
            if giver not in reductions and stepwise:
                for taker in reductions:
                    yield giver, taker
        for update in of({K.UPDATE}, number):
            if bucket.zero in {1, 2} and bucket.shard_count > 1:
                yield from ((update, gather) for gather in of({K.ALL_GATHER}, number))
    yield from ((norm, total) for norm in norms for total in summed)
    yield from ((one, update) for one in (*norms, *summed) for update in updates)


def cross_step_needs(device: DevicePlan, tasks: Sequence[Task]) -> list[Pair]:
    """Return (writer of parameters in one step, pass that reads them in the next)."""
    found: list[Pair] = []
    for number, bucket in enumerate(device.buckets):
        own = [n for n, t in enumerate(tasks) if t.bucket == number]
        writers = [n for n in own if tasks[n].kind is K.UPDATE]
        if bucket.zero in {1, 2} and bucket.shard_count > 1:
            writers = [n for n in own if tasks[n].kind is K.ALL_GATHER]
        readers = [n for n, t in enumerate(tasks) if t.kind is K.F and t.stage == bucket.stage]
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
    if wait not in gone:
        return {wait}
    return {other for before in tasks[wait].waits for other in _instead(tasks, before, gone)}


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

"""Collectives: every member of a group issues the same ones, in the same order, and in one launch order.

[Note: launch order]
Two ranks that share two communicators must launch the collectives on them in one consistent order, or each
may sit in the one that the other has not reached (NCCL, "Using multiple NCCL communicators concurrently").
Launches follow the dispatch order, whatever the streams. So the collectives of groups that span pipeline
ranks, each followed by the next one that a rank dispatches, must have no cycle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, zip_longest

import numpy as np

from simulator.plan.checks.facts import DeviceFacts, Facts
from simulator.plan.checks.shortest_cycle import Digraph
from simulator.plan.checks.violation import Violation
from simulator.plan.task import COLLECTIVE_KINDS, NONE

_KINDS = np.array(sorted(COLLECTIVE_KINDS), dtype=np.int64)
_AGREED = ("kind", "size_bytes", "microbatch", "phase", "part")
"""Columns in which the members of a collective must agree, where the table has them."""


def joint_collectives(facts: Facts) -> list[list[tuple[int, int]]]:
    """Return what meets in each collective that spans pipeline ranks: (rank, task), one per rank."""
    found: list[list[tuple[int, int]]] = []
    for sequences in _sequences(facts).values():
        meetings = zip(*sequences.values(), strict=False)
        found += [list(zip(sequences, tasks, strict=True)) for tasks in meetings]
    return found


def check_collectives(facts: Facts) -> list[Violation]:
    """Find collectives that ranks issue in different orders or numbers, or unordered."""
    found: list[Violation] = []
    for group, sequences in _sequences(facts).items():
        ranks = list(sequences)
        for rank in ranks[1:]:
            found += _difference(facts, group, {member: sequences[member] for member in (ranks[0], rank)})
    for device in facts.devices:
        found += _strangers(facts, device)
        found += _unordered(facts, device)
    return [*found, *_launches(facts)]


def _sequences(facts: Facts) -> dict[int, dict[int, Sequence[int]]]:
    """Return, by group that spans pipeline ranks, the collectives that each issues, in dispatch order."""
    found: dict[int, dict[int, Sequence[int]]] = {
        number: {rank: [] for rank in group.pipeline_ranks}
        for number, group in enumerate(facts.plan.groups)
        if len(group.pipeline_ranks) > 1
    }
    for device in facts.devices:
        for group, tasks in _by_group(device).items():
            if device.rank in found.get(group, {}):
                found[group][device.rank] = tasks
    return found


def _by_group(device: DeviceFacts) -> dict[int, list[int]]:
    table = device.plan.tasks
    rows = np.flatnonzero(np.isin(table.kind, _KINDS))
    groups = table.group[rows]
    return {group: rows[groups == group].tolist() for group in np.unique(groups).tolist()}


def _difference(facts: Facts, group: int, sequences: dict[int, Sequence[int]]) -> Iterator[Violation]:
    """Yield the first place at which two members of a group issue different collectives."""
    first, second = (facts.devices[rank] for rank in sequences)
    for number, (one, other) in enumerate(zip_longest(*sequences.values())):
        if one is None or other is None:
            counts = [len(tasks) for tasks in sequences.values()]
            rule, how = "collective-count", f"in different numbers ({counts[0]} and {counts[1]})"
        elif _signature(first, one) != _signature(second, other):
            rule, how = "collective-order", "in different orders"
        else:
            continue
        names = tuple(
            device.name(task) if task is not None else f"rank {device.rank}: nothing"
            for device, task in ((first, one), (second, other))
        )
        message = (
            f"group {facts.plan.groups[group].name} issues collectives {how}: "
            f"number {number} is {names[0]}, but {names[1]}"
        )
        yield Violation(rule=rule, message=message, tasks=names)
        return


def _signature(device: DeviceFacts, task: int) -> tuple[object, ...]:
    """Return what members must agree on: kind, size, microbatch, and the parameters of the bucket."""
    table, bucket = device.plan.tasks, int(device.plan.tasks.bucket[task])
    parameters = device.plan.buckets[bucket].parameters if bucket != NONE else ()
    agreed = (int(getattr(table, name)[task]) for name in _AGREED if hasattr(table, name))
    return (*agreed, parameters)


def _strangers(facts: Facts, device: DeviceFacts) -> Iterator[Violation]:
    for group, tasks in _by_group(device).items():
        if device.rank not in facts.plan.groups[group].pipeline_ranks:
            names = device.names(tasks)
            message = (
                f"{names[0]} is a collective of group {facts.plan.groups[group].name}, which lacks its rank"
            )
            yield Violation(rule="collective-stranger", message=message, tasks=names)


def _unordered(facts: Facts, device: DeviceFacts) -> Iterator[Violation]:
    """Yield collectives of one group on two streams of a device that nothing orders."""
    for group, tasks in _by_group(device).items():
        array = np.array(tasks)
        loose = ~device.before(array[:-1], array[1:])
        for place in np.flatnonzero(loose).tolist():
            names = device.names(tasks[place : place + 2])
            message = (
                f"collectives of group {facts.plan.groups[group].name} may start in either order: "
                f"{names[0]} and {names[1]} are on different streams and neither waits for the other"
            )
            yield Violation(rule="collective-unordered", message=message, tasks=names)


def _launches(facts: Facts) -> Iterator[Violation]:
    """Yield the shortest circle of collectives that ranks launch in contradicting orders."""
    meetings = joint_collectives(facts)
    of_rank: dict[int, list[tuple[int, int]]] = {}
    for number, places in enumerate(meetings):
        for rank, task in places:
            of_rank.setdefault(rank, []).append((task, number))
    launched = {rank: [number for _, number in sorted(tasks)] for rank, tasks in of_rank.items()}
    steps = {(a, b): rank for rank, numbers in launched.items() for a, b in pairwise(numbers)}
    edges = np.array(list(steps), dtype=np.int64).reshape(len(steps), 2)
    graph = Digraph(count=len(meetings), sources=edges[:, 0], targets=edges[:, 1])
    if not len(graph.unsorted()):
        return
    clauses: list[str] = []
    tasks: list[str] = []
    for rank, first, last in _joined(graph.shortest_cycle(), launched):
        device, position = facts.devices[rank], {number: task for task, number in of_rank[rank]}
        names = device.names((position[first], position[last]))
        clauses.append(f"{names[0]} before {device.codes[position[last]]}")
        tasks += names
    message = f"ranks launch collectives of several groups in contradicting orders: {', but '.join(clauses)}"
    yield Violation(rule="launch-order", message=message, tasks=tuple(dict.fromkeys(tasks)))


def _joined(cycle: list[int], launched: dict[int, list[int]]) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, first, last) for each stretch of a cycle of collectives that one rank launches."""
    place = {rank: {number: i for i, number in enumerate(numbers)} for rank, numbers in launched.items()}
    ring, start = [*cycle, cycle[0]], 0
    while start < len(ring) - 1:
        ends = {rank: _reach(ring, start, places) for rank, places in place.items()}
        rank = max(ends, key=lambda one: ends[one])
        yield rank, ring[start], ring[ends[rank]]
        start = ends[rank]


def _reach(ring: list[int], start: int, places: dict[int, int]) -> int:
    """Return how far along the ring a rank launches one after another from `start`."""
    end = start
    while end + 1 < len(ring) and places.get(ring[end], len(places)) < places.get(ring[end + 1], NONE):
        end += 1
    return end

"""Collectives: every member of a group issues the same ones, in the same order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import numpy as np

from simulator.plan.checks.facts import DeviceFacts, Facts
from simulator.plan.checks.violation import Violation
from simulator.plan.task import COLLECTIVE_KINDS, NONE


def collective_sequences(facts: Facts) -> list[dict[int, Sequence[int]]]:
    """Return, by group, the collectives that each of its pipeline ranks issues, in dispatch order."""
    found: list[dict[int, Sequence[int]]] = [
        {rank: [] for rank in group.pipeline_ranks} for group in facts.plan.groups
    ]
    for device in facts.devices:
        for group, tasks in _by_group(device).items():
            if device.rank in found[group]:
                found[group][device.rank] = tasks
    return found


def check_collectives(facts: Facts) -> list[Violation]:
    """Find collectives that members of a group issue in different orders or numbers, or unordered."""
    found: list[Violation] = []
    for group, sequences in enumerate(collective_sequences(facts)):
        ranks = list(sequences)
        for rank in ranks[1:]:
            found += _difference(facts, group, {member: sequences[member] for member in (ranks[0], rank)})
    for device in facts.devices:
        found += _strangers(facts, device)
        found += _unordered(facts, device)
    return found


def _by_group(device: DeviceFacts) -> dict[int, list[int]]:
    table = device.plan.tasks
    rows = np.flatnonzero(np.isin(table.kind, list(COLLECTIVE_KINDS)))
    found: dict[int, list[int]] = {}
    for task, group in zip(rows.tolist(), table.group[rows].tolist(), strict=True):
        found.setdefault(group, []).append(task)
    return found


def _difference(facts: Facts, group: int, sequences: dict[int, Sequence[int]]) -> Iterator[Violation]:
    """Yield the first place at which two members of a group issue different collectives."""
    first, second = (facts.devices[rank] for rank in sequences)
    for number, (one, other) in enumerate(zip_longest(*sequences.values())):
        names = tuple(
            device.name(task) if task is not None else f"rank {device.rank}: nothing"
            for device, task in ((first, one), (second, other))
        )
        if one is None or other is None:
            counts = [len(tasks) for tasks in sequences.values()]
            rule, how = "collective-count", f"in different numbers ({counts[0]} and {counts[1]})"
        elif _signature(first, one) != _signature(second, other):
            rule, how = "collective-order", "in different orders"
        else:
            continue
        message = (
            f"group {facts.plan.groups[group].name} issues collectives {how}: "
            f"number {number} is {names[0]}, but {names[1]}"
        )
        yield Violation(rule=rule, message=message, tasks=names)
        return


def _signature(device: DeviceFacts, task: int) -> tuple[int, int, tuple[str, ...]]:
    """Return what members must agree on: kind, size, and the parameters of the bucket."""
    table, bucket = device.plan.tasks, int(device.plan.tasks.bucket[task])
    parameters = device.plan.buckets[bucket].parameters if bucket != NONE else ()
    return int(table.kind[task]), int(table.size_bytes[task]), parameters


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

"""Every task waits, directly or not, for the tasks whose results it needs; every needed transfer exists."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simulator.plan.checks.facts import DeviceFacts, Facts, Indices
from simulator.plan.checks.passes import Passes, passes_of
from simulator.plan.checks.violation import Violation
from simulator.plan.plan import Edge
from simulator.plan.task import NONE, RECV_KINDS, SEND_KINDS, TaskKind

Pair = tuple[Indices, Indices]
"""Tasks by microbatch, and the tasks that need their results."""


def check_dataflow(facts: Facts) -> list[Violation]:
    """Find tasks that may start before what they need is done, and values that never travel."""
    found: list[Violation] = []
    transfers = [_transfers(facts, device) for device in facts.devices]
    for device in facts.devices:
        pairs = [*_pass_pairs(passes := passes_of(facts, device))]
        pairs += _local_pairs(facts, passes)
        pairs += _transfer_pairs(facts, device, (passes, transfers[device.rank]))
        found += _unordered(device, pairs)
    return [*found, *_never_sent(facts, transfers), *_without_edge(facts)]


_Transfers = dict[tuple[TaskKind, int], Indices]
"""Tasks by microbatch, for each kind and edge."""


def _transfers(facts: Facts, device: DeviceFacts) -> _Transfers:
    table, found = device.plan.tasks, {}
    for kind in sorted(SEND_KINDS | RECV_KINDS):
        for edge in range(len(facts.plan.edges)):
            tasks = np.flatnonzero((table.kind == kind) & (table.edge == edge))
            by_microbatch = np.full(facts.plan.training.num_microbatches, NONE, dtype=np.int64)
            by_microbatch[table.microbatch[tasks]] = tasks
            found[kind, edge] = by_microbatch
    return found


def _pass_pairs(passes: Passes) -> Iterator[Pair]:
    """Yield F before R before B, and BI before BW."""
    task, gradient = passes.task, passes.gradient
    yield task[TaskKind.F].ravel(), gradient.ravel()
    yield task[TaskKind.F].ravel(), task[TaskKind.R].ravel()
    yield task[TaskKind.R].ravel(), gradient.ravel()
    yield task[TaskKind.BI].ravel(), task[TaskKind.BW].ravel()


def _local_pairs(facts: Facts, passes: Passes) -> Iterator[Pair]:
    """Yield producer before consumer between segments of this device, and the reverse for gradients."""
    forward, gradient = passes.task[TaskKind.F], passes.gradient
    for segment in passes.segments.tolist():
        for producer, output in facts.plan.segments[segment].inputs:
            if producer == NONE or passes.row[producer] == NONE:
                continue
            source, target = passes.row[producer], passes.row[segment]
            yield forward[source], forward[target]
            if facts.plan.segments[producer].outputs[output].requires_grad:
                yield gradient[target], gradient[source]


def _transfer_pairs(facts: Facts, device: DeviceFacts, tables: tuple[Passes, _Transfers]) -> Iterator[Pair]:
    """Yield F before its send, a receive before the F that needs it, and the same for gradients."""
    passes, transfers = tables
    forward, gradient = passes.task[TaskKind.F], passes.gradient
    for number, edge in _crossing(facts):
        if facts.owner[edge.source_stage] == device.rank:
            for producer, _ in edge.values:
                yield forward[passes.row[producer]], transfers[TaskKind.SEND_F, number]
            for producer, _ in edge.grad_values:
                yield transfers[TaskKind.RECV_B, number], gradient[passes.row[producer]]
        if facts.owner[edge.target_stage] == device.rank:
            for segment in passes.segments.tolist():
                if facts.plan.segments[segment].stage != edge.target_stage:
                    continue
                inputs = facts.plan.segments[segment].inputs
                if not set(inputs).isdisjoint(edge.values):
                    yield transfers[TaskKind.RECV_F, number], forward[passes.row[segment]]
                if not set(inputs).isdisjoint(edge.grad_values):
                    yield gradient[passes.row[segment]], transfers[TaskKind.SEND_B, number]


def _crossing(facts: Facts) -> Iterator[tuple[int, Edge]]:
    """Yield the edges between different devices."""
    for number, edge in enumerate(facts.plan.edges):
        if facts.owner[edge.source_stage] != facts.owner[edge.target_stage]:
            yield number, edge


def _unordered(device: DeviceFacts, pairs: list[Pair]) -> Iterator[Violation]:
    if not pairs:
        return
    first = np.concatenate([pair[0] for pair in pairs])
    second = np.concatenate([pair[1] for pair in pairs])
    both = (first != NONE) & (second != NONE) & (first != second)
    first, second = first[both], second[both]
    bad = ~device.before(first, second)
    for giver, taker in np.unique(np.stack([first[bad], second[bad]]), axis=1).T.tolist():
        names = device.names((giver, taker))
        message = f"{names[1]} needs the result of {names[0]}, but does not wait for it"
        yield Violation(rule="missing-order", message=message, tasks=names)


def _never_sent(facts: Facts, transfers: list[_Transfers]) -> Iterator[Violation]:
    """Yield values of a microbatch that cross devices without any transfer."""
    for number, edge in _crossing(facts):
        source, target = facts.owner[edge.source_stage], facts.owner[edge.target_stage]
        for what, needed, sent, received in (
            ("activations", edge.values, (source, TaskKind.SEND_F), (target, TaskKind.RECV_F)),
            ("gradients", edge.grad_values, (target, TaskKind.SEND_B), (source, TaskKind.RECV_B)),
        ):
            if not needed:
                continue
            lost = (transfers[sent[0]][sent[1], number] == NONE) & (
                transfers[received[0]][received[1], number] == NONE
            )
            for microbatch in np.flatnonzero(lost).tolist():
                message = (
                    f"the {what} of microbatch {microbatch} between stages {edge.source_stage} and "
                    f"{edge.target_stage} are never transferred between ranks {source} and {target}"
                )
                yield Violation(rule="transfer-missing", message=message)


def _without_edge(facts: Facts) -> Iterator[Violation]:
    """Yield inputs from another device that no edge carries."""
    segments = facts.plan.segments
    carried = {(edge.target_stage, value) for edge in facts.plan.edges for value in edge.values}
    for number, segment in enumerate(segments):
        for producer, output in segment.inputs:
            if producer == NONE or facts.owner[segments[producer].stage] == facts.owner[segment.stage]:
                continue
            if (segment.stage, (producer, output)) not in carried:
                message = (
                    f"segment {number} ({segment.name}) needs output {output} of segment {producer} "
                    f"({segments[producer].name}) on another rank, but no edge carries it"
                )
                yield Violation(rule="edge-missing", message=message)

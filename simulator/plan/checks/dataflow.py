"""Every task waits, directly or not, for the tasks whose results it needs; every needed transfer exists."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simulator.plan.checks.facts import DeviceFacts, Facts, Indices
from simulator.plan.checks.violation import Violation
from simulator.plan.plan import Edge
from simulator.plan.task import NONE, TaskKind

Pair = tuple[Indices, Indices]
"""Tasks by microbatch, and the tasks that need their results."""

_KINDS = (TaskKind.SEND_F, TaskKind.RECV_F, TaskKind.SEND_B, TaskKind.RECV_B)


def check_dataflow(facts: Facts) -> list[Violation]:
    """Find tasks that may start before what they need is done, and values that never travel."""
    found: list[Violation] = []
    transfers = [_transfers(facts, device) for device in facts.devices]
    for device in facts.devices:
        pairs = [*_pass_pairs(facts, device), *_local_pairs(facts, device)]
        pairs += _transfer_pairs(facts, device, transfers[device.rank])
        found += _unordered(device, pairs)
    return [*found, *_never_sent(facts, transfers), *_without_edge(facts)]


_Transfers = dict[TaskKind, Indices]
"""By kind int64 [edges, microbatch]: the task, or NONE."""


def _transfers(facts: Facts, device: DeviceFacts) -> _Transfers:
    table, found = device.plan.tasks, {}
    shape = (len(facts.plan.edges), facts.plan.training.num_microbatches)
    for kind in _KINDS:
        tasks = np.flatnonzero(table.kind == kind)[::-1]
        found[kind] = np.full(shape, NONE, dtype=np.int64)
        found[kind][table.edge[tasks], table.microbatch[tasks]] = tasks
    return found


def _pass_pairs(facts: Facts, device: DeviceFacts) -> Iterator[Pair]:
    """Yield F before R before B, and BI before BW."""
    passes = facts.passes[device.rank]
    task, gradient = passes.task, passes.gradient
    yield task[TaskKind.F].ravel(), gradient.ravel()
    yield task[TaskKind.F].ravel(), task[TaskKind.R].ravel()
    yield task[TaskKind.R].ravel(), gradient.ravel()
    yield task[TaskKind.BI].ravel(), task[TaskKind.BW].ravel()


def _local_pairs(facts: Facts, device: DeviceFacts) -> Iterator[Pair]:
    """Yield producer before consumer between segments of this device, and the reverse for gradients."""
    passes = facts.passes[device.rank]
    forward, gradient = passes.task[TaskKind.F], passes.gradient
    for segment in passes.segments.tolist():
        for producer, output in facts.plan.segments[segment].inputs:
            if producer == NONE or passes.row[producer] == NONE:
                continue
            source, target = passes.row[producer], passes.row[segment]
            yield forward[source], forward[target]
            if facts.plan.segments[producer].outputs[output].requires_grad:
                yield gradient[target], gradient[source]


def _transfer_pairs(facts: Facts, device: DeviceFacts, transfers: _Transfers) -> Iterator[Pair]:
    """Yield F before its send, a receive before the F that needs it, and the same for gradients."""
    passes = facts.passes[device.rank]
    forward, gradient, mine = passes.task[TaskKind.F], passes.gradient, set(device.plan.stages)
    for number, edge in enumerate(facts.plan.edges):
        if edge.source_stage in mine:
            for producer, _ in edge.values:
                yield forward[passes.row[producer]], transfers[TaskKind.SEND_F][number]
            for producer, _ in edge.grad_values:
                yield transfers[TaskKind.RECV_B][number], gradient[passes.row[producer]]
        if edge.target_stage in mine:
            yield from _into(facts, device, (number, edge, transfers))


def _into(facts: Facts, device: DeviceFacts, arriving: tuple[int, Edge, _Transfers]) -> Iterator[Pair]:
    number, edge, transfers = arriving
    passes = facts.passes[device.rank]
    for segment in np.flatnonzero(facts.stage_of_segment == edge.target_stage).tolist():
        row, inputs = passes.row[segment], facts.plan.segments[segment].inputs
        if not set(inputs).isdisjoint(edge.values):
            yield transfers[TaskKind.RECV_F][number], passes.task[TaskKind.F][row]
            yield transfers[TaskKind.RECV_F][number], passes.task[TaskKind.R][row]
        if not set(inputs).isdisjoint(edge.grad_values):
            yield passes.gradient[row], transfers[TaskKind.SEND_B][number]


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
        if device.comes_before(taker, giver):
            circle = " -> ".join(device.codes[task] for task in (taker, giver, taker))
            message = f"{names[1]} needs the result of {names[0]}, which comes after it: a cycle {circle}"
            yield Violation(rule="cycle", message=message, tasks=names)
        else:
            message = f"{names[1]} needs the result of {names[0]}, but does not wait for it"
            yield Violation(rule="missing-order", message=message, tasks=names)


def _never_sent(facts: Facts, transfers: list[_Transfers]) -> Iterator[Violation]:
    """Yield values of a microbatch that cross devices without any transfer."""
    for number, edge in enumerate(facts.plan.edges):
        below, above = facts.place[edge.source_stage], facts.place[edge.target_stage]
        for what, needed, (source, sent), (target, received) in (
            ("activations", edge.values, (below, TaskKind.SEND_F), (above, TaskKind.RECV_F)),
            ("gradients", edge.grad_values, (above, TaskKind.SEND_B), (below, TaskKind.RECV_B)),
        ):
            if not needed:
                continue
            crossing = (source != target) & (source != NONE) & (target != NONE)
            for microbatch in np.flatnonzero(crossing).tolist():
                ranks = int(source[microbatch]), int(target[microbatch])
                listed = (
                    transfers[ranks[0]][sent][number, microbatch],
                    transfers[ranks[1]][received][number, microbatch],
                )
                if set(listed) == {NONE}:
                    message = (
                        f"the {what} of microbatch {microbatch} between stages {edge.source_stage} and "
                        f"{edge.target_stage} are never transferred between ranks {ranks[0]} and {ranks[1]}"
                    )
                    stages = (edge.source_stage, edge.target_stage)
                    yield Violation(rule="transfer-missing", message=message, stages=stages)


def _without_edge(facts: Facts) -> Iterator[Violation]:
    """Yield inputs from another device that no edge carries."""
    segments = facts.plan.segments
    carried = {(edge.target_stage, value) for edge in facts.plan.edges for value in edge.values}
    for number, segment in enumerate(segments):
        for producer, output in segment.inputs:
            if producer == NONE:
                continue
            source = segments[producer].stage
            apart = facts.place[source] != facts.place[segment.stage]
            if apart.any() and (segment.stage, (producer, output)) not in carried:
                message = (
                    f"segment {number} ({segment.name}) needs output {output} of segment {producer} "
                    f"({segments[producer].name}) on another rank, but no edge carries it"
                )
                yield Violation(rule="edge-missing", message=message, stages=(source, segment.stage))

"""What a device receives from one with another mesh is regrouped among its ranks before it is used.

[Note: who must regroup]
Two devices that differ in dp have unlike samples on rank i. A receiver with fewer replicas lacks samples in
any case. One with more has all it needs only where ranks of tp hold whole tokens, on a mesh without cp.
Tokens are cut over tp where some region is entered or left by all-gathers or reduce-scatters over tp.
A regrouping is a collective of a microbatch over a group of axis "pp" that has one pipeline rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simulator.plan.checks.facts import DeviceFacts, Facts, Indices
from simulator.plan.checks.violation import Violation
from simulator.plan.task import COLLECTIVE_KINDS, NONE, TaskKind

_KINDS = np.array(sorted(COLLECTIVE_KINDS), dtype=np.int64)
_OF_TOKENS = np.array([TaskKind.ALL_GATHER, TaskKind.REDUCE_SCATTER], dtype=np.int64)
_PASS = {TaskKind.RECV_F: TaskKind.F, TaskKind.RECV_B: TaskKind.B}


def check_regrouping(facts: Facts) -> list[Violation]:
    """Find tensors that are used as they came from a device with another mesh."""
    if all(device.plan.mesh is None for device in facts.devices):
        return []
    cut = any(_cuts_tokens(facts, device) for device in facts.devices)
    return [violation for device in facts.devices for violation in _device(facts, device, tokens_cut=cut)]


def _cuts_tokens(facts: Facts, device: DeviceFacts) -> bool:
    """Return whether a device gathers or scatters tokens over tp within its passes."""
    table = device.plan.tasks
    over_tp = [number for number, group in enumerate(facts.plan.groups) if group.axis == "tp"]
    chosen = np.isin(table.kind, _OF_TOKENS) & np.isin(table.group, over_tp) & (table.bucket == NONE)
    return bool(chosen.any())


def _device(facts: Facts, device: DeviceFacts, *, tokens_cut: bool) -> Iterator[Violation]:
    table = device.plan.tasks
    for kind, phase in _PASS.items():
        received = np.flatnonzero(table.kind == kind)
        for edge, peer in np.unique(np.stack([table.edge, table.peer])[:, received], axis=1).T.tolist():
            mine = received[(table.edge[received] == edge) & (table.peer[received] == peer)]
            if _is_needed(facts, device, int(mine[0]), tokens_cut=tokens_cut):
                yield from _missing(facts, device, mine, phase=phase)


def _is_needed(facts: Facts, device: DeviceFacts, received: int, *, tokens_cut: bool) -> bool:
    """Return whether a rank gets other tensors than it needs ([Note: who must regroup])."""
    plan, table = facts.plan, device.plan.tasks
    peer, edge = int(table.peer[received]), plan.edges[int(table.edge[received])]
    gradient = int(table.kind[received]) == TaskKind.RECV_B
    ours, theirs = (plan.axis_size("dp", pipeline_rank=rank) for rank in (device.rank, peer))
    values = edge.grad_values if gradient else edge.values
    divided = any(plan.segments[segment].outputs[output].batch_dim is not None for segment, output in values)
    alike = ours > theirs and not tokens_cut and plan.axis_size("cp", pipeline_rank=device.rank) == 1
    return ours != theirs and divided and not alike


def _missing(facts: Facts, device: DeviceFacts, received: Indices, *, phase: TaskKind) -> Iterator[Violation]:
    """Yield receives that no regrouping of their microbatch and pass comes after."""
    table = device.plan.tasks
    groups = facts.plan.groups
    inside = [n for n, one in enumerate(groups) if one.axis == "pp" and len(one.pipeline_ranks) == 1]
    chosen = np.isin(table.kind, _KINDS) & np.isin(table.group, inside) & (table.bucket == NONE)
    regroupings = np.flatnonzero(chosen & (table.phase == phase) & (table.microbatch != NONE))
    for task in received.tolist():
        alike = table.microbatch[regroupings] == table.microbatch[task]
        after = regroupings[alike & (table.stage[regroupings] == table.stage[task])]
        if not device.before(np.full(len(after), task), after).any():
            name = device.name(task)
            message = (
                f"{name} brings tensors of other samples or tokens than its ranks need (the mesh of rank "
                f"{table.peer[task]} is another one), and no collective regroups them"
            )
            yield Violation(rule="never-regrouped", message=message, tasks=(name,))

"""Sends and receives: one partner each, the bytes of what they carry, one order at both ends.

[Note: channels]
The transfers of a pair of ranks that share a stream at the sender and a stream at the receiver are a
channel: it delivers in the order in which it is fed, so both ends must list them in the same order.
Transfers of a pair on other streams have their own communicator and may overtake; whether they can block
each other is what the search for circular waits answers.

[Note: message bytes]
An edge names its tensors with shape and dtype for the first microbatch size; other sizes scale the
microbatch dimension. Where tokens or hidden units are cut over ranks (axes cp, tp) a message is a share of
that, the same for all microbatches. Between devices with unlike meshes it is the share of a rank of the end
with more replicas, each of which has fewer sequences of a microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from cost_models.ops import DTYPE_BYTES
from simulator.plan.checks.facts import Facts, Flags, Indices
from simulator.plan.checks.violation import Violation
from simulator.plan.mesh import Mesh
from simulator.plan.plan import Edge, Plan
from simulator.plan.task import RECV_KINDS, SEND_KINDS, TaskKind

_GRADIENT_KINDS = frozenset({TaskKind.SEND_B, TaskKind.RECV_B})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransferEnds:
    """All sends or all receives of a plan, by pipeline rank and dispatch order, as columns.

    Args:
        rank, task: where each is listed.
        source, target: pipeline ranks.
        edge, microbatch: what it carries.
        gradient: whether it carries gradients.
        stream, size_bytes: as the task says.
        key: equal exactly for transfers of the same tensors between the same ranks.
    """

    rank: Indices
    task: Indices
    source: Indices
    target: Indices
    edge: Indices
    microbatch: Indices
    gradient: Indices
    stream: Indices
    size_bytes: Indices
    key: Indices

    def name(self, facts: Facts, row: int) -> str:
        """Return the task of a row with its rank."""
        return facts.devices[int(self.rank[row])].name(int(self.task[row]))

    def firsts(self) -> tuple[Indices, Indices]:
        """Return the distinct keys, rising, and the first row of each."""
        keys, rows = np.unique(self.key, return_index=True)
        return keys, rows


def matched_transfers(facts: Facts) -> tuple[TransferEnds, TransferEnds, Indices, Indices]:
    """Return sends, receives, and the rows of both that meet, in the order of the sends."""
    sends, recvs = _ends(facts, SEND_KINDS), _ends(facts, RECV_KINDS)
    (send_keys, send_rows), (recv_keys, recv_rows) = sends.firsts(), recvs.firsts()
    _, ours, theirs = np.intersect1d(send_keys, recv_keys, assume_unique=True, return_indices=True)
    rows = np.argsort(send_rows[ours])
    return sends, recvs, send_rows[ours][rows], recv_rows[theirs][rows]


def check_transfers(facts: Facts) -> list[Violation]:
    """Find transfers without partner, of wrong size, between wrong ranks, or in different orders."""
    sends, recvs, met_sends, met_recvs = matched_transfers(facts)
    return [
        *_repeated(facts, sends),
        *_repeated(facts, recvs),
        *_lonely(facts, sends, (met_sends, "receive")),
        *_lonely(facts, recvs, (met_recvs, "send")),
        *_unequal(facts, (sends, recvs), (met_sends, met_recvs)),
        *_wrong_bytes(facts, sends, met_sends),
        *_misplaced(facts, sends),
        *_different_orders(facts, (sends, recvs), (met_sends, met_recvs)),
    ]


def _ends(facts: Facts, kinds: frozenset[TaskKind]) -> TransferEnds:
    outgoing = kinds == SEND_KINDS
    columns: dict[str, list[Indices]] = {}
    for device in facts.devices:
        table = device.plan.tasks
        rows = np.flatnonzero(np.isin(table.kind, list(kinds)))
        here = np.full(len(rows), device.rank, dtype=np.int64)
        peers = table.peer[rows]
        found = {
            "rank": here,
            "task": rows,
            "source": here if outgoing else peers,
            "target": peers if outgoing else here,
            "gradient": np.isin(table.kind[rows], list(_GRADIENT_KINDS)).astype(np.int64),
        }
        found |= {name: getattr(table, name)[rows] for name in ("edge", "microbatch", "stream", "size_bytes")}
        for name, column in found.items():
            columns.setdefault(name, []).append(column)
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    sizes = (len(facts.devices), len(facts.plan.edges), facts.plan.training.num_microbatches, 2)
    key = joined["source"]
    for name, size in zip(("target", "edge", "microbatch", "gradient"), sizes, strict=True):
        key = key * size + joined[name]
    return TransferEnds(**joined, key=key)


def _repeated(facts: Facts, ends: TransferEnds) -> Iterator[Violation]:
    _, firsts = ends.firsts()
    again = np.ones(len(ends.key), dtype=np.bool_)
    again[firsts] = False
    for row in np.flatnonzero(again).tolist():
        name = ends.name(facts, row)
        message = f"{name} moves what an earlier task moved already"
        yield Violation(rule="transfer-repeated", message=message, tasks=(name,))


def _lonely(facts: Facts, ends: TransferEnds, met: tuple[Indices, str]) -> Iterator[Violation]:
    rows, word = met
    _, firsts = ends.firsts()
    for row in np.sort(np.setdiff1d(firsts, rows)).tolist():
        name = ends.name(facts, row)
        source, target = int(ends.source[row]), int(ends.target[row])
        peer = target if word == "receive" else source
        message = f"{name} has no matching {word} on rank {peer}"
        yield Violation(rule="transfer-unmatched", message=message, tasks=(name,))


def _unequal(
    facts: Facts, ends: tuple[TransferEnds, TransferEnds], met: tuple[Indices, Indices]
) -> Iterator[Violation]:
    (sends, recvs), (send_rows, recv_rows) = ends, met
    bad = sends.size_bytes[send_rows] != recvs.size_bytes[recv_rows]
    for send, recv in zip(send_rows[bad].tolist(), recv_rows[bad].tolist(), strict=True):
        names = (sends.name(facts, send), recvs.name(facts, recv))
        message = (
            f"{names[0]} sends {sends.size_bytes[send]} bytes, "
            f"{names[1]} receives {recvs.size_bytes[recv]} bytes"
        )
        yield Violation(rule="transfer-size", message=message, tasks=names)


def message_bytes(plan: Plan, edge: Edge, *, gradient: bool, replicas: int) -> Indices:
    """Return by microbatch the bytes of an edge's tensors on one of so many replicas, before any cut."""
    sizes = np.array(plan.training.micro_batch_sizes, dtype=np.int64)
    local = sizes * plan.mesh.size("dp") // replicas
    total = np.zeros(len(sizes), dtype=np.int64)
    for segment, output in edge.grad_values if gradient else edge.values:
        spec = plan.segments[segment].outputs[output]
        each = prod(spec.shape) * DTYPE_BYTES[spec.dtype]
        total += each if spec.batch_dim is None else each * local // sizes[0]
    return total


def finer_end(plan: Plan, source: int, target: int) -> Mesh:
    """Return the mesh of the one of two pipeline ranks that has more replicas."""
    meshes = [plan.device_plans[rank].mesh or plan.mesh for rank in (source, target)]
    return max(meshes, key=lambda mesh: mesh.size("dp"))


def _fixed_bytes(plan: Plan, edge: Edge, *, gradient: bool) -> int:
    """Return the bytes of an edge's tensors without a microbatch dimension: no rank cuts those (tables)."""
    specs = [plan.segments[s].outputs[o] for s, o in (edge.grad_values if gradient else edge.values)]
    return sum(prod(spec.shape) * DTYPE_BYTES[spec.dtype] for spec in specs if spec.batch_dim is None)


def _wrong_bytes(facts: Facts, sends: TransferEnds, rows: Indices) -> Iterator[Violation]:
    """Yield matched transfers whose size is not that of the tensors of their edge."""
    plan = facts.plan
    number = sends.edge * 2 + sends.gradient
    for which in np.unique(number[rows]).tolist():
        mine = rows[number[rows] == which]
        edge = plan.edges[which // 2]
        mesh = finer_end(plan, int(sends.source[mine[0]]), int(sends.target[mine[0]]))
        cut = mesh.size("tp") * mesh.size("cp")
        shares = [share for share in range(1, cut + 1) if cut % share == 0]
        whole = message_bytes(plan, edge, gradient=bool(which % 2), replicas=mesh.size("dp"))
        whole = whole[sends.microbatch[mine]]
        fixed = _fixed_bytes(plan, edge, gradient=bool(which % 2))
        moved = sends.size_bytes[mine] - fixed
        bad = _least_bad([moved * share != whole - fixed for share in shares])
        for row, expected in zip(mine[bad].tolist(), whole[bad].tolist(), strict=True):
            name = sends.name(facts, row)
            message = (
                f"{name} moves {sends.size_bytes[row]} bytes, but the tensors from stage {edge.source_stage} "
                f"to stage {edge.target_stage} have {expected}"
            )
            yield Violation(rule="transfer-bytes", message=message, tasks=(name,))


def _least_bad(candidates: list[Flags]) -> Flags:
    return min(candidates, key=lambda bad: int(bad.sum()))


def _misplaced(facts: Facts, sends: TransferEnds) -> Iterator[Violation]:
    """Yield sends between ranks that do not run that microbatch of the stages of their edge."""
    stages = np.array([(edge.source_stage, edge.target_stage) for edge in facts.plan.edges], dtype=np.int64)
    if not len(stages):
        return
    ends = stages[sends.edge]
    ends = np.where(sends.gradient[:, None] == 1, ends[:, ::-1], ends)
    homes = facts.place[ends, sends.microbatch[:, None]]
    for row in np.flatnonzero((homes[:, 0] != sends.source) | (homes[:, 1] != sends.target)).tolist():
        name = sends.name(facts, row)
        source, target = ends[row].tolist()
        message = (
            f"{name} goes to rank {sends.target[row]}, but stages {source} and {target} are elsewhere: "
            f"microbatch {sends.microbatch[row]} is on rank {homes[row, 0]} and rank {homes[row, 1]}"
        )
        yield Violation(rule="transfer-misplaced", message=message, tasks=(name,))


def _different_orders(
    facts: Facts, ends: tuple[TransferEnds, TransferEnds], met: tuple[Indices, Indices]
) -> Iterator[Violation]:
    """Yield the first difference of every channel ([Note: channels])."""
    (sends, recvs), (send_rows, recv_rows) = ends, met
    channels = np.stack(
        [sends.source[send_rows], sends.target[send_rows], sends.stream[send_rows], recvs.stream[recv_rows]],
        axis=1,
    )
    names, channel_of = np.unique(channels, axis=0, return_inverse=True)
    order = np.argsort(channel_of.ravel(), kind="stable")
    starts = np.searchsorted(channel_of.ravel()[order], np.arange(len(names) + 1))
    for number, (source, target, _, _) in enumerate(names.tolist()):
        pairs = order[starts[number] : starts[number + 1]]
        sent, received = np.sort(send_rows[pairs]), np.sort(recv_rows[pairs])
        differ = np.flatnonzero(sends.key[sent] != recvs.key[received])
        if len(differ):
            place = int(differ[0])
            tasks = (sends.name(facts, int(sent[place])), recvs.name(facts, int(received[place])))
            message = (
                f"transfers from rank {source} to rank {target} are listed in different orders: "
                f"number {place} is {tasks[0]} at the sender and {tasks[1]} at the receiver"
            )
            yield Violation(rule="transfer-order", message=message, tasks=tasks)

"""Sends and receives: each has one partner of equal size, and both ends list them in one order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from simulator.plan.checks.facts import Facts
from simulator.plan.checks.violation import Violation
from simulator.plan.plan import Edge
from simulator.plan.task import RECV_KINDS, SEND_KINDS, TaskKind

Key = tuple[int, int, int, int, bool]
"""Source and target pipeline rank, edge, microbatch, whether it is a gradient."""

_GRADIENT_KINDS = frozenset({TaskKind.SEND_B, TaskKind.RECV_B})


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A send and its receive: pipeline ranks and dispatch positions."""

    source: int
    send: int
    target: int
    recv: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Listed:
    """All transfers by key, in dispatch order; further ones with the same key stand in `repeated`."""

    sends: dict[Key, int]
    recvs: dict[Key, int]
    repeated: list[tuple[int, int]]


def matched_transfers(facts: Facts) -> list[Match]:
    """Return every send that has a receive, by sender and dispatch order."""
    listed = _list_transfers(facts)
    return [
        Match(source=key[0], send=send, target=key[1], recv=listed.recvs[key])
        for key, send in listed.sends.items()
        if key in listed.recvs
    ]


def check_transfers(facts: Facts) -> list[Violation]:
    """Find transfers without partner, of unequal size, between wrong ranks, or in different orders."""
    listed = _list_transfers(facts)
    return [
        *_repeated(facts, listed),
        *_lonely(facts, listed),
        *_unequal(facts, listed),
        *_misplaced(facts, listed),
        *_different_orders(facts, listed),
    ]


def _list_transfers(facts: Facts) -> _Listed:
    listed = _Listed(sends={}, recvs={}, repeated=[])
    for device in facts.devices:
        table = device.plan.tasks
        rows = np.flatnonzero(np.isin(table.kind, list(SEND_KINDS | RECV_KINDS)))
        columns = (table.kind, table.peer, table.edge, table.microbatch)
        for task, kind, peer, edge, microbatch in zip(
            rows.tolist(), *(column[rows].tolist() for column in columns), strict=True
        ):
            ends = (device.rank, peer) if kind in SEND_KINDS else (peer, device.rank)
            key = (*ends, edge, microbatch, kind in _GRADIENT_KINDS)
            side = listed.sends if kind in SEND_KINDS else listed.recvs
            if key in side:
                listed.repeated.append((device.rank, task))
            else:
                side[key] = task
    return listed


def _repeated(facts: Facts, listed: _Listed) -> Iterator[Violation]:
    for rank, task in listed.repeated:
        name = facts.devices[rank].name(task)
        yield Violation(
            rule="transfer-repeated",
            message=f"{name} moves what an earlier task moved already",
            tasks=(name,),
        )


def _lonely(facts: Facts, listed: _Listed) -> Iterator[Violation]:
    for side, other, here, word in (
        (listed.sends, listed.recvs, 0, "receive"),
        (listed.recvs, listed.sends, 1, "send"),
    ):
        for key, task in side.items():
            if key not in other:
                name = facts.devices[key[here]].name(task)
                message = f"{name} has no matching {word} on rank {key[1 - here]}"
                yield Violation(rule="transfer-unmatched", message=message, tasks=(name,))


def _unequal(facts: Facts, listed: _Listed) -> Iterator[Violation]:
    sizes = [device.plan.tasks.size_bytes.tolist() for device in facts.devices]
    for key, send in listed.sends.items():
        recv = listed.recvs.get(key)
        if recv is not None and sizes[key[0]][send] != sizes[key[1]][recv]:
            names = (facts.devices[key[0]].name(send), facts.devices[key[1]].name(recv))
            message = (
                f"{names[0]} sends {sizes[key[0]][send]} bytes, "
                f"{names[1]} receives {sizes[key[1]][recv]} bytes"
            )
            yield Violation(rule="transfer-size", message=message, tasks=names)


def _misplaced(facts: Facts, listed: _Listed) -> Iterator[Violation]:
    for key, send in listed.sends.items():
        edge = facts.plan.edges[key[2]]
        ends = _stages(edge, gradient=key[4])
        if (facts.owner[ends[0]], facts.owner[ends[1]]) != key[:2]:
            name = facts.devices[key[0]].name(send)
            message = f"{name} goes to rank {key[1]}, but stages {ends[0]} and {ends[1]} are elsewhere"
            yield Violation(rule="transfer-misplaced", message=message, tasks=(name,))


def _stages(edge: Edge, *, gradient: bool) -> tuple[int, int]:
    ends = (edge.source_stage, edge.target_stage)
    return ends[::-1] if gradient else ends


def _different_orders(facts: Facts, listed: _Listed) -> Iterator[Violation]:
    sent, received = _by_pair(listed.sends, listed.recvs), _by_pair(listed.recvs, listed.sends)
    for pair, keys in sent.items():
        for number, (key, other) in enumerate(zip(keys, received[pair], strict=True)):
            if key != other:
                source, target = facts.devices[pair[0]], facts.devices[pair[1]]
                names = (source.name(listed.sends[key]), target.name(listed.recvs[other]))
                message = (
                    f"transfers from rank {pair[0]} to rank {pair[1]} are listed in different orders: "
                    f"number {number} is {names[0]} at the sender and {names[1]} at the receiver"
                )
                yield Violation(rule="transfer-order", message=message, tasks=names)
                break


def _by_pair(side: dict[Key, int], other: dict[Key, int]) -> dict[tuple[int, int], list[Key]]:
    """Return the matched keys of each (source, target) pair, in the dispatch order of this side."""
    found: dict[tuple[int, int], list[Key]] = {}
    for key in side:
        if key in other:
            found.setdefault((key[0], key[1]), []).append(key)
    return found

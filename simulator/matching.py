"""Matching: which send meets which receive, and which tasks form one collective, over all device plans.

Transfers match by (edge, microbatch, direction, both pipeline ranks), collectives by (group, kind, bucket
or norm, microbatch, phase, part); where a key occurs several times in a step, the n-th meets the n-th.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from simulator.errors import IllegalPlanError
from simulator.plan import (
    COLLECTIVE_KINDS,
    MATCHING_SEND,
    NONE,
    SEND_KINDS,
    DevicePlan,
    IndexLists,
    Plan,
    TaskKind,
)

_SENDS = np.array(sorted(SEND_KINDS), dtype=np.int64)
_TRANSFERS = np.array(sorted([*MATCHING_SEND, *MATCHING_SEND.values()]), dtype=np.int64)
_COLLECTIVES = np.array(sorted(COLLECTIVE_KINDS), dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Matching:
    """Counterparts by task number (device plans one after another).

    Args:
        device_starts: int64 [device plans + 1], first task of each device plan.
        is_send: bool [tasks].
        partner: int64 [tasks], the other end of a transfer, or NONE.
        collective: int64 [tasks], number of the collective, or NONE.
        members: task numbers by collective, in the order of device plans.
    """

    device_starts: npt.NDArray[np.int64]
    is_send: npt.NDArray[np.bool_]
    partner: npt.NDArray[np.int64]
    collective: npt.NDArray[np.int64]
    members: IndexLists


def match_tasks(plan: Plan) -> Matching:
    """Find every task's counterparts.

    Raises: IllegalPlanError listing each transfer or collective that would wait for ever, or whose ends
        disagree about the size.
    """
    device_starts = np.zeros(len(plan.device_plans) + 1, dtype=np.int64)
    np.cumsum([len(device.tasks) for device in plan.device_plans], out=device_starts[1:])
    matcher = _Matcher(plan=plan, device_starts=device_starts)
    partner = matcher.transfers()
    members = matcher.collectives()
    is_send = np.isin(np.concatenate([device.tasks.kind for device in plan.device_plans]), _SENDS)
    sends = np.flatnonzero(is_send & (partner != NONE))
    matcher.check_sizes([*zip(sends.tolist(), partner[sends].tolist(), strict=True), *members])
    if matcher.violations:
        raise IllegalPlanError(where="plan", violations=matcher.violations)
    collective = np.full(len(is_send), NONE, dtype=np.int64)
    for number, tasks in enumerate(members):
        collective[list(tasks)] = number
    return Matching(
        device_starts=device_starts,
        is_send=is_send,
        partner=partner,
        collective=collective,
        members=IndexLists.from_rows(members),
    )


@dataclass(kw_only=True, slots=True)
class _Matcher:
    """One walk over a plan; what cannot be matched ends up in `violations`."""

    plan: Plan
    device_starts: npt.NDArray[np.int64]
    violations: list[str] = field(default_factory=list)
    codes: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def transfers(self) -> npt.NDArray[np.int64]:
        """Return the other end of every transfer, by task."""
        ends: dict[Hashable, tuple[list[int], list[int]]] = {}
        for number, device in enumerate(self.plan.device_plans):
            first = int(self.device_starts[number])
            for key, position, is_recv in _transfer_keys(device):
                ends.setdefault(key, ([], []))[is_recv].append(first + position)
        partner = np.full(int(self.device_starts[-1]), NONE, dtype=np.int64)
        for sent, received in ends.values():
            common = min(len(sent), len(received))
            partner[sent[:common]] = received[:common]
            partner[received[:common]] = sent[:common]
            self.violations += [f"{self._name(task)} is never received" for task in sent[common:]]
            self.violations += [f"{self._name(task)} is never sent" for task in received[common:]]
        return partner

    def collectives(self) -> list[tuple[int, ...]]:
        """Return the tasks of every collective, one per device plan of its group."""
        joined: dict[tuple[Hashable, ...], dict[int, list[int]]] = {}
        for number, device in enumerate(self.plan.device_plans):
            first = int(self.device_starts[number])
            for key, position in _collective_keys(device):
                by_rank = joined.setdefault(key, {})
                by_rank.setdefault(device.pipeline_rank, []).append(first + position)
        members: list[tuple[int, ...]] = []
        for (group, *_), by_rank in joined.items():
            ranks = self.plan.groups[group].pipeline_ranks if isinstance(group, int) and group != NONE else ()
            members += self._one_per_rank(ranks, by_rank)
        return members

    def check_sizes(self, meetings: list[tuple[int, ...]]) -> None:
        """Note every meeting whose tasks disagree about the bytes that move."""
        size = np.concatenate([device.tasks.size_bytes for device in self.plan.device_plans]).tolist()
        for tasks in meetings:
            if len({size[task] for task in tasks}) > 1:
                ends = " and ".join(f"{self._name(task)} ({size[task]} bytes)" for task in tasks)
                self.violations.append(f"{ends} disagree about the size")

    def _one_per_rank(self, ranks: tuple[int, ...], by_rank: dict[int, list[int]]) -> list[tuple[int, ...]]:
        most = max(map(len, by_rank.values()))
        missing = [rank for rank in ranks if len(by_rank.get(rank, [])) < most]
        strangers = [rank for rank in by_rank if rank not in ranks]
        if not missing and not strangers:
            return [tuple(sorted(tasks)) for tasks in zip(*(by_rank[rank] for rank in ranks), strict=True)]
        last = max(by_rank.values(), key=len)[-1]
        self.violations += [f"pipeline rank {rank} never joins {self._name(last)}" for rank in missing]
        self.violations += [
            f"{self._name(by_rank[rank][0])} does not belong to the group that it names" for rank in strangers
        ]
        return []

    def _name(self, task: int) -> str:
        number = int(np.searchsorted(self.device_starts, task, side="right")) - 1
        device = self.plan.device_plans[number]
        if number not in self.codes:
            self.codes[number] = device.codes()
        code = self.codes[number][task - int(self.device_starts[number])]
        return f"{code} of pipeline rank {device.pipeline_rank}"


def _transfer_keys(device: DevicePlan) -> list[tuple[Hashable, int, bool]]:
    """Return (key, position, is a receive) of every transfer; both ends have the same key."""
    table, here = device.tasks, device.pipeline_rank
    found = np.flatnonzero(np.isin(table.kind, _TRANSFERS))
    columns = (found, table.kind[found], table.edge[found], table.microbatch[found], table.peer[found])
    keys: list[tuple[Hashable, int, bool]] = []
    for position, kind, edge, microbatch, peer in zip(*(c.tolist() for c in columns), strict=True):
        received = TaskKind(kind) in MATCHING_SEND
        sent_as = MATCHING_SEND[TaskKind(kind)] if received else kind
        ends = (peer, here) if received else (here, peer)
        keys.append(((int(sent_as), edge, microbatch, *ends), position, received))
    return keys


def _collective_keys(device: DevicePlan) -> list[tuple[tuple[Hashable, ...], int]]:
    """Return (key, position) of every collective; all members have the same key."""
    table = device.tasks
    found = np.flatnonzero(np.isin(table.kind, _COLLECTIVES))
    names = ("group", "kind", "bucket", "microbatch", "phase", "part", "stage")
    columns = (found, *(getattr(table, name)[found] for name in names))
    keys: list[tuple[tuple[Hashable, ...], int]] = []
    for row in zip(*(c.tolist() for c in columns), strict=True):
        position, group, kind, bucket, microbatch, phase, part, stage = row
        # A bucket has one name on all its ranks, but several stages may hold it (tied parameters).
        name = ("norm" if phase == NONE else stage) if bucket == NONE else device.buckets[bucket].name
        keys.append(((group, name, kind, microbatch, phase, part), position))
    return keys

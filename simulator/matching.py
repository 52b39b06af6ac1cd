"""Matching: which send meets which receive, and which tasks form one collective, over all device plans.

Transfers match by (edge, microbatch, direction, both pipeline ranks), collectives by (group, kind, bucket
or norm, microbatch, phase, part); where a key occurs several times in a step, the n-th meets the n-th.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from simulator.distinct import distinct_rows, occurrence
from simulator.errors import IllegalPlanError
from simulator.plan import (
    COLLECTIVE_KINDS,
    MATCHING_SEND,
    NONE,
    RECV_KINDS,
    SEND_KINDS,
    DevicePlan,
    IndexLists,
    Plan,
    TaskKind,
)

Ints = npt.NDArray[np.int64]

_SENDS = np.array(sorted(SEND_KINDS), dtype=np.int64)
_RECEIVES = np.array(sorted(RECV_KINDS), dtype=np.int64)
_COLLECTIVES = np.array(sorted(COLLECTIVE_KINDS), dtype=np.int64)
_SENT_AS = np.array([MATCHING_SEND.get(kind, kind) for kind in TaskKind], dtype=np.int64)
"""Kind of the send, by kind of a transfer at either end."""


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

    device_starts: Ints
    is_send: npt.NDArray[np.bool_]
    partner: Ints
    collective: Ints
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
    collective, members = matcher.collectives()
    is_send = np.isin(matcher.column("kind"), _SENDS)
    matcher.check_sizes(np.flatnonzero(is_send & (partner != NONE)), partner, members)
    if matcher.violations:
        raise IllegalPlanError(where="plan", violations=matcher.violations)
    return Matching(
        device_starts=device_starts,
        is_send=is_send,
        partner=partner,
        collective=collective,
        members=members,
    )


@dataclass(kw_only=True, slots=True)
class _Matcher:
    """One walk over a plan; what cannot be matched ends up in `violations`."""

    plan: Plan
    device_starts: Ints
    violations: list[str] = field(default_factory=list)
    codes: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def column(self, name: str) -> Ints:
        """Return a column of the task tables of all device plans."""
        return np.concatenate([getattr(device.tasks, name) for device in self.plan.device_plans])

    def transfers(self) -> Ints:
        """Return the other end of every transfer, by task."""
        kind = self.column("kind")
        found = np.flatnonzero(np.isin(kind, _SENDS) | np.isin(kind, _RECEIVES))
        received = np.isin(kind[found], _RECEIVES)
        here, peer = self._pipeline_rank()[found], self.column("peer")[found]
        ends = (np.where(received, peer, here), np.where(received, here, peer))
        edge, microbatch = self.column("edge")[found], self.column("microbatch")[found]
        _, key = distinct_rows([_SENT_AS[kind[found]], edge, microbatch, *ends])
        nth = occurrence(2 * key + received)
        _, meeting = distinct_rows([key, nth])
        by_end = np.full((2, len(found)), NONE, dtype=np.int64)
        by_end[received.astype(np.int64), meeting] = found
        sent, accepted = by_end[:, (by_end != NONE).all(axis=0)]
        partner = np.full(len(kind), NONE, dtype=np.int64)
        partner[sent] = accepted
        partner[accepted] = sent
        alone = partner[found] == NONE
        self.violations += [
            f"{self._name(task)} is never {'sent' if is_recv else 'received'}"
            for task, is_recv in zip(found[alone].tolist(), received[alone].tolist(), strict=True)
        ]
        return partner

    def collectives(self) -> tuple[Ints, IndexLists]:
        """Return the collective of every task, and the tasks of each, one per device plan of its group."""
        kind, group = self.column("kind"), self.column("group")
        found = np.flatnonzero(np.isin(kind, _COLLECTIVES))
        names = ("kind", "group", "microbatch", "phase", "part")
        columns = [self.column(name)[found] for name in names]
        _, key = distinct_rows([*columns, self._bucket_or_stage()[found]])
        here = self._pipeline_rank()[found]
        _, meeting = distinct_rows([key, occurrence(distinct_rows([key, here])[1])])
        counts = np.bincount(meeting)
        order = np.argsort(meeting, kind="stable")
        joins, sizes = self._membership()
        complete = counts == sizes[group[found[order]]][np.cumsum(counts) - counts]
        wrong = ~joins[group[found], here] | ~complete[meeting]
        for number in distinct_rows([key[wrong]])[0].tolist():
            self._name_faults(found[key == key[wrong][number]].tolist())
        collective = np.full(len(kind), NONE, dtype=np.int64)
        collective[found] = meeting
        starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        return collective, IndexLists(starts=starts, values=found[order])

    def check_sizes(self, sends: Ints, partner: Ints, members: IndexLists) -> None:
        """Note every meeting whose tasks disagree about the bytes that move."""
        size = self.column("size_bytes")
        differing = sends[size[sends] != size[partner[sends]]]
        meetings: list[tuple[int, ...]] = [(task, int(partner[task])) for task in differing.tolist()]
        if len(members.values):
            moved, starts = size[members.values], members.starts[:-1]
            uneven = np.maximum.reduceat(moved, starts) != np.minimum.reduceat(moved, starts)
            meetings += [members.row(number) for number in np.flatnonzero(uneven).tolist()]
        for tasks in meetings:
            ends = " and ".join(f"{self._name(task)} ({int(size[task])} bytes)" for task in tasks)
            self.violations.append(f"{ends} disagree about the size")

    def _pipeline_rank(self) -> Ints:
        """Return the pipeline rank of every task."""
        ranks = [device.pipeline_rank for device in self.plan.device_plans]
        return np.repeat(np.array(ranks, dtype=np.int64), np.diff(self.device_starts))

    def _bucket_or_stage(self) -> Ints:
        """Return a number for what a collective moves: a bucket, the norm, or values of a stage.

        A bucket has one name on all its ranks, but several stages may hold it (tied parameters).
        """
        numbers: dict[str, int] = {}
        found = []
        for device in self.plan.device_plans:
            table = device.tasks
            named = [numbers.setdefault(bucket.name, len(numbers)) for bucket in device.buckets]
            of_bucket = np.array([*named, NONE], dtype=np.int64)[table.bucket]
            unnamed = np.where(table.phase == NONE, -1, -3 - table.stage)
            found.append(np.where(table.bucket == NONE, unnamed, of_bucket))
        return np.concatenate(found)

    def _membership(self) -> tuple[npt.NDArray[np.bool_], Ints]:
        """Return who takes part, bool [groups + 1, pipeline ranks], and how many; the last row: no group."""
        groups = self.plan.groups
        joins = np.zeros((len(groups) + 1, int(self._pipeline_rank().max(initial=0)) + 1), dtype=np.bool_)
        for number, group in enumerate(groups):
            joins[number, [rank for rank in group.pipeline_ranks if rank < joins.shape[1]]] = True
        return joins, np.array([*(len(group.pipeline_ranks) for group in groups), NONE], dtype=np.int64)

    def _name_faults(self, tasks: list[int]) -> None:
        """Note who never joins, and who is no member, of the collectives with one key that `tasks` are."""
        group = int(self.column("group")[tasks[0]])
        ranks = self.plan.groups[group].pipeline_ranks if group != NONE else ()
        by_rank: dict[int, list[int]] = {}
        for task in tasks:
            by_rank.setdefault(self._device(task).pipeline_rank, []).append(task)
        most = max(map(len, by_rank.values()))
        last = max(by_rank.values(), key=len)[-1]
        missing = [rank for rank in ranks if len(by_rank.get(rank, [])) < most]
        self.violations += [f"pipeline rank {rank} never joins {self._name(last)}" for rank in missing]
        self.violations += [
            f"{self._name(found[0])} does not belong to the group that it names"
            for rank, found in by_rank.items()
            if rank not in ranks
        ]

    def _device(self, task: int) -> DevicePlan:
        return self.plan.device_plans[int(np.searchsorted(self.device_starts, task, side="right")) - 1]

    def _name(self, task: int) -> str:
        number = int(np.searchsorted(self.device_starts, task, side="right")) - 1
        device = self.plan.device_plans[number]
        if number not in self.codes:
            self.codes[number] = device.codes()
        code = self.codes[number][task - int(self.device_starts[number])]
        return f"{code} of pipeline rank {device.pipeline_rank}"

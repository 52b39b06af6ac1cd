"""Folding: ranks -> units that do the same at the same time, and who meets whom among units.

[Note: units] is implemented here: colours of ranks are refined until ranks of one colour meet ranks of the
same colours in every group and at the other end of every transfer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.distinct import distinct_rows
from simulator.jitter.disturbance import Disturbance
from simulator.plan import NONE, RECV_KINDS, SEND_KINDS, Plan

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_TRANSFERS = np.array(sorted(SEND_KINDS | RECV_KINDS), dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Units:
    """Units by number, in the order of their lowest ranks, and the sets of units that meet in collectives.

    Args:
        of_rank: int64 [ranks], unit of each rank.
        first_rank: int64 [units], lowest rank.
        num_ranks: int64 [units].
        device: int64 [units], number of the device plan.
        peer: int64 [units, device plans], unit at the other end of transfers with a device plan, or NONE.
        peer_factor: float64 [units, device plans], by which these take longer.
        set_of: int64 [groups, units], number of the set of a group to which a unit belongs, or NONE.
        set_starts: int64 [groups + 1], first set of each group.
        set_factor: float64 [sets], by which collectives of a set take longer.
        set_draw: int64 [sets], lowest rank that draws for a set.
        member_starts: int64 [sets + 1], first member of each set.
        member: int64 [members], units; by position in `Group.pipeline_ranks`, then by number.
        member_place: int64 [members], position of the unit's device plan in `Group.pipeline_ranks`.
        member_ranks: int64 [members], how many ranks of the unit are in one concrete set of ranks.
    """

    of_rank: Ints
    first_rank: Ints
    num_ranks: Ints
    device: Ints
    peer: Ints
    peer_factor: Floats
    set_of: Ints
    set_starts: Ints
    set_factor: Floats
    set_draw: Ints
    member_starts: Ints
    member: Ints
    member_place: Ints
    member_ranks: Ints

    @property
    def num_units(self) -> int:
        """Return the number of units."""
        return len(self.first_rank)

    def ranks_of(self, unit: int) -> list[int]:
        """Return the ranks of a unit, rising."""
        return np.flatnonzero(self.of_rank == unit).tolist()


def folded(plan: Plan, disturbance: Disturbance) -> Units:
    """Return as few units as there can be."""
    meetings = _Meetings(plan, disturbance)
    return meetings.units(meetings.refined(_own_colours(plan, disturbance)))


def unfolded(plan: Plan, disturbance: Disturbance) -> Units:
    """Return one unit for every rank."""
    return _Meetings(plan, disturbance).units(np.arange(plan.num_ranks))


def _own_colours(plan: Plan, disturbance: Disturbance) -> Ints:
    """Return by rank a number for its device plan, its figures, and for what it draws."""
    draws = disturbance.noisy | (disturbance.hiccup_chance > 0) | bool(len(disturbance.communication_noise))
    columns = [
        _devices(plan),
        _numbered(disturbance.compute_factor),
        disturbance.noisy.astype(np.int64),
        disturbance.hiccup_chance,
        disturbance.hiccup_ns,
        np.where(draws, disturbance.draw, NONE),
    ]
    return distinct_rows(columns)[1]


class _Meetings:
    """Which ranks meet in groups and transfers, and by how much the network slows them there."""

    def __init__(self, plan: Plan, disturbance: Disturbance) -> None:
        self.plan = plan
        self.disturbance = disturbance
        self.device = _devices(plan)
        self.sets = [np.array(group.members, dtype=np.int64) for group in plan.groups]
        self.set_factors = [self._factor(ranks) for ranks in self.sets]
        self.ranks = [np.flatnonzero(self.device == number) for number in range(len(plan.device_plans))]
        self.pairs = sorted(set(_pairs(plan)))

    def refined(self, colour: Ints) -> Ints:
        """Split colours until ranks of one colour meet the same colours."""
        count = int(colour.max()) + 1
        while count < len(colour):
            colour = distinct_rows([colour, *self._met(colour)])[1]
            before, count = count, int(colour.max()) + 1
            if count == before:
                break
        return colour

    def _met(self, colour: Ints) -> Iterator[Ints]:
        """Yield columns by rank: numbers of the colours that it meets in a group, or at a device plan."""
        for ranks, factor in zip(self.sets, self.set_factors, strict=True):
            alike = _numbered_rows(_without_repeats(colour[ranks]))
            yield self._spread(ranks, distinct_rows([alike, _numbered(factor)])[1])
        for here, there in self.pairs:
            pairs = np.stack([self.ranks[here], self.ranks[there]], axis=1)
            met = distinct_rows([colour[pairs[:, 1]], _numbered(self._factor(pairs))])[1]
            yield self._spread(pairs[:, :1], met)

    def _spread(self, ranks: Ints, number: Ints) -> Ints:
        found = np.full(len(self.device), NONE, dtype=np.int64)
        found[ranks.ravel()] = np.repeat(number, ranks.shape[1])
        return found

    def _factor(self, ranks: Ints) -> Floats:
        """Return by set of ranks, [sets, ranks of a set], by how much the slowest network link slows it."""
        node = self.disturbance.node[ranks]
        slowest = self.disturbance.network_factor[ranks].max(axis=1)
        crosses = node.max(axis=1) > node.min(axis=1)
        return np.where(crosses, slowest, 1.0)

    def units(self, of_rank: Ints) -> Units:
        """Return the units of a numbering that rises with the lowest rank of each."""
        count = int(of_rank.max()) + 1
        first = np.full(count, len(of_rank), dtype=np.int64)
        np.minimum.at(first, of_rank, np.arange(len(of_rank)))
        peer = np.full((count, len(self.ranks)), NONE, dtype=np.int64)
        peer_factor = np.ones((count, len(self.ranks)))
        for here, there in self.pairs:
            pairs = np.stack([self.ranks[here], self.ranks[there]], axis=1)
            peer[of_rank[pairs[:, 0]], there] = of_rank[pairs[:, 1]]
            peer_factor[of_rank[pairs[:, 0]], there] = self._factor(pairs)
        columns = self._set_columns(of_rank, first)
        return Units(
            of_rank=of_rank,
            first_rank=first,
            num_ranks=np.bincount(of_rank, minlength=count),
            device=self.device[first],
            peer=peer,
            peer_factor=peer_factor,
            **columns,
        )

    def _set_columns(self, of_rank: Ints, first: Ints) -> dict[str, Any]:
        set_of = np.full((len(self.sets), len(first)), NONE, dtype=np.int64)
        set_starts, members = [0], [np.zeros((0, 3), dtype=np.int64)]
        factors, draws = [np.zeros(0)], [np.zeros(0, dtype=np.int64)]
        for number, ranks in enumerate(self.sets):
            units = of_rank[ranks]
            chosen = distinct_rows([_numbered_rows(_without_repeats(units))])[0]
            for row in units[chosen]:
                found, counts = np.unique(row, return_counts=True)
                place = np.searchsorted(self.plan.groups[number].pipeline_ranks, self.device[first[found]])
                set_of[number, found] = len(members) - 1
                order = np.lexsort((found, place))
                members.append(np.stack([found, place, counts], axis=1)[order])
            set_starts.append(set_starts[-1] + len(chosen))
            factors.append(self.set_factors[number][chosen])
            draws.append(self.disturbance.draw[ranks[chosen]].min(axis=1))
        rows = np.concatenate(members)
        lengths = [len(found) for found in members]
        return {
            "set_of": set_of,
            "set_starts": np.array(set_starts, dtype=np.int64),
            "set_factor": np.concatenate(factors),
            "set_draw": np.concatenate(draws),
            "member_starts": np.cumsum(lengths, dtype=np.int64),
            "member": rows[:, 0],
            "member_place": rows[:, 1],
            "member_ranks": rows[:, 2],
        }


def _devices(plan: Plan) -> Ints:
    """Return the number of the device plan of each rank, int64 [ranks]."""
    found = np.zeros(plan.num_ranks, dtype=np.int64)
    if len(plan.device_plans) > 1:
        for number, device in enumerate(plan.device_plans):
            found[list(plan.mesh.ranks(pp=device.pipeline_rank))] = number
    return found


def _pairs(plan: Plan) -> Iterator[tuple[int, int]]:
    """Yield which device plans exchange messages, in both directions."""
    for number, device in enumerate(plan.device_plans):
        table = device.tasks
        for peer in np.unique(table.peer[np.isin(table.kind, _TRANSFERS)]).tolist():
            yield from ((number, peer), (peer, number))


def _numbered(values: npt.NDArray[Any]) -> Ints:
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def _without_repeats(rows: Ints) -> Ints:
    """Return rows of numbers in rising order, repeated ones replaced by NONE: equal for equal sets."""
    rows = np.sort(rows, axis=1)
    rows[:, 1:][rows[:, 1:] == rows[:, :-1]] = NONE
    return np.sort(rows, axis=1)


def _numbered_rows(rows: Ints) -> Ints:
    """Return a number for every row, equal for equal rows, int64 [rows]."""
    numbers: dict[bytes, int] = {}
    return np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in rows], dtype=np.int64)

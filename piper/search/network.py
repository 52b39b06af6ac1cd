"""Prices of the messages of a step as tables over sizes: of groups of replicas, and between stages.

[Note: prices between two sizes]
A message is never faster than a smaller one. A bound takes the price of the next smaller size of a grid, an
estimate interpolates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from cost_models.models.cluster import ClusterCostModel
from cost_models.price import CollectiveKind

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_STEPS_PER_DOUBLING = 4
_LEAST_LOG2, _MOST_LOG2 = 10, 40
_GRID = 2.0 ** (
    np.arange((_MOST_LOG2 - _LEAST_LOG2) * _STEPS_PER_DOUBLING + 1) / _STEPS_PER_DOUBLING + _LEAST_LOG2
)
"""Bytes."""


@dataclass(kw_only=True)
class Network:
    """Prices of messages on one cluster, ns.

    Args:
        cost_model: of the cluster.
    """

    cost_model: ClusterCostModel
    _tables: dict[tuple[CollectiveKind, int, int], Floats] = field(default_factory=dict)
    _held: dict[tuple[CollectiveKind | None, int, int, int], float] = field(default_factory=dict)

    @cached_property
    def host_copy_ns_per_byte(self) -> float:
        """Return the price of a byte of a large copy between a device and its host, without its latency."""
        small, large = (self.cost_model.host_copy(size_bytes=size).seconds for size in (2**28, 2**29))
        return (large - small) / 2**28 * 1e9

    def collective_ns(
        self,
        kind: CollectiveKind,
        size_bytes: Floats,
        *,
        ranks: Ints,
        stride: Ints,
        floor: bool,
        pieces: Floats | float = 1.0,
    ) -> Floats:
        """Return the price of a collective of every row, float64 [n].

        Args:
            kind: which.
            size_bytes: float64 [n].
            ranks, stride: int64 [n], members of a group, and how far they lie apart; one rank costs nothing.
            floor: whether a lower bound is wanted.
            pieces: float64 [n], into how many it is cut at least: a bound takes the time of all of the
                smallest pieces if that is more, an estimate that of equal ones.
        """
        found, number_of = np.zeros(len(size_bytes)), np.broadcast_to(pieces, size_bytes.shape)
        pairs = np.stack([ranks, stride], axis=1)
        distinct, number = np.unique(pairs, axis=0, return_inverse=True)
        for index, (members, apart) in enumerate(distinct.tolist()):
            mine = number.reshape(-1) == index
            if members > 1:
                table, size, count = self._table(kind, members, apart), size_bytes[mine], number_of[mine]
                if floor:
                    found[mine] = np.maximum(_looked_up(table, size, floor=True), count * table[0])
                else:
                    found[mine] = count * _looked_up(table, size / np.maximum(count, 1.0), floor=False)
        return found

    def held(self, kind: CollectiveKind, size_bytes: float, *, ranks: int, stride: int) -> float:
        """Return which part of the processors of a device a collective holds; 0 where nothing is shared."""
        size = 2 ** int(np.log2(max(size_bytes, 1.0)))
        key = (kind, ranks, stride, size)
        if key not in self._held:
            members = np.arange(0, ranks * stride, stride, dtype=np.int64)
            number = ranks * stride
            machine = self.cost_model.machine(number) if ranks > 1 else None
            self._held[key] = 0.0
            if machine is not None and machine.cores is None:
                groups = members[None, :]
                use = self.cost_model.collective_use(kind, size_bytes=size, members=groups, num_ranks=number)
                self._held[key] = use.processors / machine.processors
        return self._held[key]

    def held_by_message(self, size_bytes: float, *, apart: int) -> float:
        """Return which part of the processors a receive holds while it waits for `apart` ranks before it."""
        key = (None, 2, apart, 2 ** int(np.log2(max(size_bytes, 1.0))))
        if apart <= 0 or size_bytes <= 0:
            return 0.0
        if key not in self._held:
            machine = self.cost_model.machine(2 * apart)
            self._held[key] = 0.0
            if machine is not None and machine.cores is None:
                pairs = np.array([[0, apart]], dtype=np.int64)
                use = self.cost_model.transfer_use(size_bytes=key[-1], pairs=pairs, num_ranks=2 * apart)
                self._held[key] = use.processors / machine.processors
        return self._held[key]

    def transfer_ns(self, size_bytes: float, *, apart: int) -> float:
        """Return the price of a message to the rank `apart` further on."""
        if apart <= 0:
            return 0.0
        price = self.cost_model.transfer(size_bytes=int(size_bytes), source_rank=0, target_rank=apart)
        return price.seconds * 1e9

    def _table(self, kind: CollectiveKind, members: int, apart: int) -> Floats:
        key = (kind, members, apart)
        if key not in self._tables:
            spread = self.cost_model.cluster.spread(range(0, members * apart, apart))
            price = self.cost_model.collectives.price
            self._tables[key] = np.array([price(kind, int(size), spread).seconds * 1e9 for size in _GRID])
        return self._tables[key]


def _looked_up(table: Floats, size_bytes: Floats, *, floor: bool) -> Floats:
    place = (np.log2(np.maximum(size_bytes, _GRID[0])) - _LEAST_LOG2) * _STEPS_PER_DOUBLING
    if floor:
        found = table[np.minimum(np.floor(place).astype(np.int64), len(table) - 1)]
        return np.asarray(np.where(size_bytes < _GRID[0], 0.0, found))
    return np.asarray(np.where(size_bytes <= 0, 0.0, np.interp(size_bytes, _GRID, table)))

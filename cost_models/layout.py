"""Where the members of many sets of ranks lie, as arrays: how many share a node, which nodes follow."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from cost_models.topology import Spread

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Layout:
    """Sets of ranks of one size on nodes (or any other runs of `per_node` ranks).

    Args:
        members: int64 [sets, n].
        per_node: devices of a node.

    Attributes:
        flat: int64 [sets x n], the members, set by set.
        num_nodes: int64 [sets], nodes with at least one member of the set.
        fewest, most: int64 [sets], members on the node that has the fewest, the most.
    """

    def __init__(self, members: Ints, per_node: int) -> None:
        self.members = members
        self._spreads: dict[bool, list[Spread]] = {}
        self.num_sets, self.num_ranks = members.shape
        self.flat = members.ravel()
        self._nodes = members // per_node
        self._stride = int(self._nodes.max(initial=0)) + 1
        key = (self._nodes + np.arange(self.num_sets)[:, None] * self._stride).ravel()
        keys, self._place, self._counts = np.unique(key, return_inverse=True, return_counts=True)
        self._set, self._node = np.divmod(keys, self._stride)
        self._first = np.flatnonzero(np.diff(self._set, prepend=-1))
        self.num_nodes: Ints = np.diff(self._first, append=len(keys))
        self.fewest: Ints = np.minimum.reduceat(self._counts, self._first)
        self.most: Ints = np.maximum.reduceat(self._counts, self._first)

    @cached_property
    def here(self) -> Ints:
        """Return how many members of its set lie on the node of each member: int64 [sets x n]."""
        here: Ints = self._counts[self._place]
        return here

    def per_member(self, of_set: Flags) -> Flags:
        """Return a flag of each set as one of each member: bool [sets x n]."""
        return np.repeat(of_set, self.num_ranks)

    def neighbours(self, of_set: Flags) -> tuple[Ints, Ints, Ints]:
        """Return set, node and next node of the ring through the nodes of each set that `of_set` marks.

        Nodes follow each other by number, as ranks fill them.
        """
        following = np.arange(1, len(self._node) + 1)
        following[self._first + self.num_nodes - 1] = self._first
        chosen = of_set[self._set]
        return self._set[chosen], self._node[chosen], self._node[following[chosen]]

    def spreads(self, *, shift: bool) -> list[Spread]:
        """Return the ways in which sets lie; shift: told apart by the members that leave a node, too."""
        if shift not in self._spreads:
            self._spreads[shift] = self._found_spreads(shift=shift)
        return self._spreads[shift]

    def _found_spreads(self, *, shift: bool) -> list[Spread]:
        columns = [self.num_nodes, self.fewest, self.most]
        if shift:
            leaves = (self._nodes != np.roll(self._nodes, -1, axis=1)).ravel()
            leaving = np.bincount(self._place[leaves], minlength=len(self._counts))
            columns.append(np.maximum(np.maximum.reduceat(leaving, self._first), 1))
        number = np.zeros(self.num_sets, dtype=np.int64)
        for column in columns:  # joined two at a time: one number for all of them may not fit
            _, number = np.unique(number * (self.num_ranks + 1) + column, return_inverse=True)
        _, chosen = np.unique(number, return_index=True)
        rows = np.stack(columns, axis=1)[np.sort(chosen)].tolist()
        return [
            Spread(
                num_ranks=self.num_ranks, num_nodes=nodes, fewest=fewest, most=most, leaving=max([1, *rest])
            )
            for nodes, fewest, most, *rest in rows
        ]

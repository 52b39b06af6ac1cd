"""The device mesh: named axes over the ranks of a job, and the groups of ranks along an axis."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cost_models.errors import check_invariant

GROUP_AXES = ("tp", "cp", "ep", "dp", "pp", "world")
"""What a group of ranks may communicate for; attribution has one label for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Named axes in rank order, fastest first (DESIGN 3: tp, cp, dp, pp).

    Args:
        axes: (name, size) pairs; rank = sum of coordinate x product of the sizes before it.
    """

    axes: tuple[tuple[str, int], ...]

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks (the product of all sizes)."""
        return math.prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """Return the size of `axis`; an axis that the mesh lacks has size 1."""
        return dict(self.axes).get(axis, 1)

    def coordinate(self, rank: int, axis: str) -> int:
        """Return the position of `rank` along `axis`."""
        stride = 1
        for name, size in self.axes:
            if name == axis:
                return rank // stride % size
            stride *= size
        return 0

    def ranks(self, **coordinates: int) -> tuple[int, ...]:
        """Return, rising, the ranks that have all the given coordinates: `mesh.ranks(pp=0, dp=1)`."""
        grid = self._grid()
        names = [name for name, _ in self.axes]
        check_invariant(set(coordinates) <= set(names), f"axes {sorted(coordinates)} of mesh {self.axes}")
        index = tuple(coordinates.get(name, slice(None)) for name in reversed(names))
        return tuple(int(rank) for rank in np.sort(np.ravel(grid[index])))

    def _grid(self) -> npt.NDArray[np.int64]:
        sizes = [size for _, size in reversed(self.axes)]
        return np.arange(self.num_ranks).reshape(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that run collectives together.

    Args:
        name: unique in the plan, e.g. "dp0" (replicas of pipeline rank 0), "tied0", "world".
        axis: the kind of communication, for attribution: "dp", "pp", "tp", "ep", "cp".
        pipeline_ranks: the pipeline ranks whose device plans take part, rising.
        members: every concrete set of ranks, disjoint, each rising: replicas have one each.
    """

    name: str
    axis: str
    pipeline_ranks: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Return the number of ranks in each set."""
        return len(self.members[0])

    def of(self, rank: int) -> tuple[int, ...]:
        """Return the set that `rank` belongs to."""
        for ranks in self.members:
            if rank in ranks:
                return ranks
        check_invariant(False, f"rank {rank} is in no set of group {self.name}")
        return ()

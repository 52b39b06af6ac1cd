"""The frontier: cells in rising order of what they may reach, and the points that were looked at closely.

[Note: best first]
Cells start with bounds of a coarse probe. The lowest one is refined by a probe of its own, and if it still
may win, its points are estimated; so probes and estimates go where the winner may be. What was never refined
is counted as it is: its bound is above the best (bounded out), or the search ended before (not reached).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from piper.search.candidate import Candidate
from piper.search.cells import CellTable
from piper.search.estimate import Estimates, Estimator
from piper.search.matching import cells_with

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

CELLS_AT_ONCE = 64
"""Refined between two looks at the incumbent."""
NEAR = 1.02
"""Refined cells so near to the lowest unrefined one are estimated at once."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Point:
    """A point that was estimated; the order is that in which points are simulated.

    Args:
        unlikely: whether the estimate says that it does not fit.
        estimate: of the objective.
        candidate: which.
        bound, bound_s: of the objective, and of the step time.
        needed_bytes: estimated.
        cell: its cell.
    """

    unlikely: bool
    estimate: float
    candidate: Candidate
    bound: float
    bound_s: float
    needed_bytes: float
    cell: int


@dataclass(kw_only=True)
class Frontier:
    """What waits, and what is known of it.

    Args:
        table: cells.
        estimator: of points.
        objective: "time", "memory" or "cost".
        room_bytes: of a device, for what estimates count.
    """

    table: CellTable
    estimator: Estimator
    objective: str
    room_bytes: float
    points: list[Point] = field(default_factory=list)
    expanded: dict[int, int] = field(default_factory=dict)
    _waiting: list[tuple[float, float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        alive = np.flatnonzero(np.isfinite(self.low))
        keys = self._keys(alive)
        order = np.lexsort((alive, keys[1], keys[0]))
        self._waiting = [(float(keys[0][i]), float(keys[1][i]), int(alive[i])) for i in order.tolist()]

    def _keys(self, cells: Ints) -> tuple[Floats, Floats]:
        """Return what cells are ordered by: what is likely, then what cannot be beaten."""
        if self.objective == "memory":
            return self.table.least_bytes[cells], self.table.least_bytes[cells]
        return self.table.likely_ns[cells] / 1e9, self.table.bound_ns[cells] / 1e9

    @property
    def low(self) -> Floats:
        """Return what each cell cannot beat in the objective."""
        return self.table.least_bytes if self.objective == "memory" else self.table.bound_ns / 1e9

    @property
    def likely(self) -> Floats:
        """Return what each cell may reach in the objective."""
        return self._keys(np.arange(len(self.table)))[0]

    @property
    def lowest(self) -> float:
        """Return the lowest likely value of what was not estimated; infinity: nothing likely is left."""
        return self._waiting[0][0] if self._waiting else float("inf")

    @property
    def lowest_bound(self) -> float:
        """Return the lowest bound of what was not estimated; infinity: nothing is left."""
        low = self.low.copy()
        low[list(self.expanded)] = np.inf
        return float(low.min(initial=np.inf))

    def grow(self, limit: float) -> list[Point]:
        """Refine the lowest cells below `limit`, and estimate those that stay there; return new points."""
        taken: list[int] = []
        while self._waiting and len(taken) < CELLS_AT_ONCE and self._waiting[0][0] < limit:
            taken.append(heapq.heappop(self._waiting)[2])
        fresh = np.array([cell for cell in taken if not self.table.refined[cell]], dtype=np.int64)
        if len(fresh):
            self.table.refine(np.sort(fresh))
        found: list[Point] = []
        threshold = self._threshold(limit)
        for cell in taken:
            keys = [float(key[0]) for key in self._keys(np.array([cell]))]
            if not np.isfinite(self.low[cell]):
                continue
            if keys[0] > threshold:
                heapq.heappush(self._waiting, (keys[0], keys[1], cell))
            else:
                found += self._estimated(cell)
        self.points += found
        return found

    def tighten(self, limit: float) -> bool:
        """Refine the unrefined cells with the lowest bounds below `limit`; return whether there were any."""
        low = np.where(self.table.refined, np.inf, self.low)
        cells = np.flatnonzero(low < limit)
        lowest = cells[np.argsort(low[cells], kind="stable")[:CELLS_AT_ONCE]]
        if len(lowest):
            self.table.refine(np.sort(lowest))
        return len(lowest) > 0

    def estimate_one_with(self, wanted: Mapping[str, str]) -> list[Point]:
        """Estimate the lowest cell with some values that may fit; return its points."""
        cells = cells_with(self.table, wanted)
        order = cells[np.lexsort((cells, self.low[cells]))]
        for cell in order.tolist():
            if np.isfinite(self.low[cell]) and cell not in self.expanded:
                return self.estimate(np.array([cell]))
        return []

    def estimate(self, cells: Ints) -> list[Point]:
        """Refine cells that were not estimated, and estimate those that may fit; return their points."""
        self.table.refine(np.sort(cells))
        found: list[Point] = []
        for cell in cells[np.isfinite(self.low[cells])].tolist():
            found += self._estimated(cell)
        taken = set(cells.tolist())
        self._waiting = [entry for entry in self._waiting if entry[2] not in taken]
        heapq.heapify(self._waiting)
        self.points += found
        return found

    def _threshold(self, limit: float) -> float:
        """Return up to which bound refined cells are estimated now: as far as no unrefined one is lower."""
        lowest = next((low for low, _, cell in self._waiting[:1] if not self.table.refined[cell]), limit)
        return max(lowest, min(limit, lowest * NEAR))

    def _estimated(self, cell: int) -> Iterator[Point]:
        estimates = self.estimator.of(cell)
        self.expanded[cell] = len(estimates.step_ns)
        layout, working = int(self.table.layout[cell]), int(self.table.working[cell])
        fits = estimates.least_bytes <= self.table.capacity_bytes
        for row in np.flatnonzero(fits).tolist():
            yield self._point(self.table.space.candidate(layout, working, row), estimates, row, cell=cell)

    def _point(self, candidate: Candidate, estimates: Estimates, row: int, *, cell: int) -> Point:
        step_s, bound_s = float(estimates.step_ns[row]) / 1e9, float(estimates.bound_ns[row]) / 1e9
        needed, least = float(estimates.needed_bytes[row]), float(estimates.least_bytes[row])
        by_memory = self.objective == "memory"
        return Point(
            unlikely=needed > self.room_bytes,
            estimate=needed if by_memory else step_s,
            candidate=candidate,
            bound=least if by_memory else bound_s,
            bound_s=bound_s,
            needed_bytes=needed,
            cell=cell,
        )

"""Rounds of a search: estimate, choose, simulate, learn; until nothing may be better."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cost_models.units import format_duration
from piper.search.candidate import Candidate, has_values
from piper.search.corrections import Corrections
from piper.search.frontier import CELLS_AT_ONCE, Frontier, Point
from piper.search.status import Record, Status, layout_of

if TYPE_CHECKING:
    from piper.search.search import SearchRequest

ROUND_SIZE = 4
"""Simulations per round; a round is what one incumbent is compared with."""
MOST_CELLS = 512
"""Cells whose points are estimated, at most."""
MOST_TIGHTENED = 256
"""Cells that are refined for the gap alone, at most."""
MOST_ASKED = 16
"""Cells that are estimated, and points that are simulated, at most, to answer `why_not`."""
PATIENCE = 3
"""Rounds without a better strategy (by more than the gap), after which estimates are believed."""
INTERRUPTED = "interrupted"

Simulate = Callable[[Sequence[Candidate]], list[dict[str, Any]]]
"""Simulate candidates, one result each."""


@dataclass(kw_only=True)
class Rounds:
    """The state of a search: what was simulated, and what waits in rising order of its estimate."""

    request: SearchRequest
    frontier: Frontier
    started_s: float
    on_progress: Callable[[str], None] | None
    records: dict[Candidate, Record] = field(default_factory=dict)
    grown: int = 0
    corrections: Corrections = field(default_factory=Corrections)
    _waiting: list[Point] = field(default_factory=list)
    _timed: set[tuple[object, ...]] = field(default_factory=set)
    _vain: int = 0

    def run(self, simulate: Simulate) -> str:
        """Estimate and simulate in turn; return what ended it."""
        try:
            while True:
                self._grow()
                reason = self._reason_to_stop()
                if reason:
                    self._tighten(reason)
                    return reason
                self._simulate(simulate)
        except KeyboardInterrupt:
            return INTERRUPTED

    @property
    def best(self) -> float:
        """Return the best value of the objective that was simulated and fits, or infinity."""
        return min((r.objective_value(self.request.objective) for r in self._ranked()), default=float("inf"))

    def _ranked(self) -> list[Record]:
        return [record for record in self.records.values() if record.status is Status.RANKED]

    def _grow(self) -> None:
        """Estimate points until no cell may hold a better one than those that wait, or enough were seen."""
        while not self._is_spent() and not self._is_late():
            limit = self.best * (1 - self.request.gap) if self._is_full() else float("inf")
            likely = heapq.nsmallest(ROUND_SIZE, self._likely_estimates())
            if len(likely) == ROUND_SIZE:
                limit = min(limit, likely[-1])
            reach = limit / self.corrections.typical
            if self.frontier.lowest >= reach:
                return
            before = len(self.frontier.expanded)
            self._waiting += self.frontier.grow(reach)
            self.grown += len(self.frontier.expanded) - before

    def _likely_estimates(self) -> Iterator[float]:
        room = self.frontier.room_bytes
        found: dict[tuple[object, ...], float] = {}
        for point in self._waiting:
            estimate, needed = self.corrections.of(point)
            layout = layout_of(point.candidate)
            if needed <= room and estimate < found.get(layout, float("inf")):
                found[layout] = estimate
        return iter(found.values())

    def answer(self, wanted: Mapping[str, str], simulate: Simulate) -> None:
        """Simulate the most promising points with some values, until one fits or enough were tried."""
        for _ in range(MOST_ASKED):
            if any(has_values(record.candidate, wanted) for record in self._ranked()):
                return
            points = [p for p in self.frontier.points if has_values(p.candidate, wanted)]
            open_points = sorted((p for p in points if p.candidate not in self.records), key=self._rank)
            if not open_points or self._rank(open_points[0])[0]:
                fresh = self.frontier.estimate_one_with(wanted)
                if fresh:
                    continue
            if not open_points:
                return
            self._run(open_points[:1], simulate)

    def also(self, points: Sequence[Point], simulate: Simulate) -> None:
        """Simulate points beyond those that the search needs."""
        self._run(points, simulate)

    def _tighten(self, reason: str) -> None:
        """Refine the cells whose bounds decide the gap, lowest first."""
        if reason == "estimate":
            for _ in range(MOST_TIGHTENED // CELLS_AT_ONCE):
                if self._is_late() or not self.frontier.tighten(self.best * (1 - self.request.gap)):
                    return

    def _simulate(self, simulate: Simulate) -> None:
        """Simulate a round of the points with the best estimates that may still enter the ranking."""
        limit = self.best * (1 - self.request.gap) if self._is_full() else float("inf")
        self._waiting = [p for p in self._waiting if p.bound < limit or (p.bound < self.best and p.unlikely)]
        self._waiting.sort(key=self._rank)
        batch = self._chosen()
        chosen = set(map(id, batch))
        self._waiting = [point for point in self._waiting if id(point) not in chosen]
        before = self.best
        self._run(batch, simulate)
        better = self.best < before * (1 - self.request.gap)
        self._vain = 0 if better else self._vain + 1

    def _chosen(self) -> list[Point]:
        """Return the points of a round: of different kinds as long as they promise something."""
        hopeful = [p for p in self._waiting if not self._is_full() or self._promising([p], self.best)]
        kinds: dict[tuple[object, ...], Point] = {}
        for point in hopeful:
            kinds.setdefault(_alike(point.candidate), point)
        new: dict[tuple[object, ...], Point] = {}
        for point in kinds.values():
            if _figures(point) not in self._timed:
                new.setdefault(_figures(point), point)
        first = set(map(id, new.values()))
        others = [p for p in hopeful if id(p) not in first]
        return [*new.values(), *others, *(p for p in self._waiting if not hopeful)][: self._room()]

    def _rank(self, point: Point) -> tuple[bool, float, Candidate]:
        """Return the order in which points are simulated: those that should fit first, by estimate."""
        estimate, needed = self.corrections.of(point)
        return needed > self.frontier.room_bytes, estimate, point.candidate

    def _run(self, batch: Sequence[Point], simulate: Simulate) -> None:
        found = simulate([point.candidate for point in batch]) if batch else []
        for point, result in zip(batch, found, strict=True):
            self.records[point.candidate] = _simulated(point, result)
            self._timed.add(_figures(point))
            self.corrections.learn(point, result, objective=self.request.objective)
        if self.on_progress is not None:
            self.on_progress(_progress(self.request, self.records, self.frontier))

    def _reason_to_stop(self) -> str:
        best, full = self.best, self._is_full()
        limit = best * (1 - self.request.gap)
        open_points = [point for point in self._waiting if not full or point.bound < limit]
        if (
            not open_points
            and (full or not self._waiting)
            and self.frontier.lowest_bound >= (limit if full else float("inf"))
        ):
            return "bound"
        if self._is_late() and self.records:
            return "time_limit"
        if self._room() <= 0:
            return "max_candidates"
        if self._vain >= PATIENCE and (full or not self._may_fit(open_points)):
            return "estimate"
        if full and not self._promising(open_points, best) and (self._grown_enough(best) or self._is_spent()):
            return "estimate"
        return "" if open_points else "estimate" if self._is_spent() else ""

    def _is_full(self) -> bool:
        return len({layout_of(record.candidate) for record in self._ranked()}) >= self.request.top

    def _is_spent(self) -> bool:
        return self.grown >= MOST_CELLS

    def _grown_enough(self, best: float) -> bool:
        """Return whether cells that were never estimated are no better than the best, corrected."""
        return self.frontier.lowest * self.corrections.typical >= best

    def _promising(self, points: Sequence[Point], best: float) -> bool:
        room = self.frontier.room_bytes
        return any(
            needed <= room and estimate < best * (1 - self.request.gap)
            for estimate, needed in (self.corrections.optimistic(point) for point in points)
        )

    def _may_fit(self, points: Sequence[Point]) -> bool:
        room = self.frontier.room_bytes
        return any(self.corrections.optimistic(point)[1] <= room for point in points)

    def _is_late(self) -> bool:
        limit_s = self.request.time_limit_s
        return limit_s is not None and bool(self._waiting) and time.perf_counter() - self.started_s > limit_s

    def _room(self) -> int:
        if self.request.max_candidates is None:
            return ROUND_SIZE
        return min(ROUND_SIZE, self.request.max_candidates - len(self.records))


def _alike(candidate: Candidate) -> tuple[object, ...]:
    """Return what one of a round stands for: others of its kind wait for what is learned from it."""
    names = ("tp", "pp", "schedule", "recompute", "offload", "zero", "async_tp")
    return tuple(getattr(candidate, name) for name in names)


def _figures(point: Point) -> tuple[object, ...]:
    """Return what is equal for schedules that are the same with few microbatches; they wait for others."""
    return point.candidate.tp, point.candidate.pp, point.estimate, point.bound, point.needed_bytes


def _simulated(point: Point, result: dict[str, Any]) -> Record:
    bound_s, candidate = point.bound_s, point.candidate
    if result["fits"]:
        return Record(candidate=candidate, status=Status.RANKED, bound_s=bound_s, result=result)
    if "refused" in result:
        return Record(
            candidate=candidate,
            status=Status.REFUSED,
            bound_s=bound_s,
            result=result,
            reason=str(result["refused"]),
        )
    used, peak = result["needed_memory_bytes"] / 2**30, result["peak"]
    return Record(
        candidate=candidate,
        status=Status.OUT_OF_MEMORY,
        bound_s=bound_s,
        result=result,
        reason=f"needs {used:.1f} GiB of {result['device_memory_bytes'] / 2**30:.1f} GiB on pipeline rank "
        f"{peak['pipeline_rank']}, {format_duration(peak['peak_at_s'])} after the step began",
    )


def _progress(request: SearchRequest, records: dict[Candidate, Record], frontier: Frontier) -> str:
    ranked = [r for r in records.values() if r.status is Status.RANKED]
    best = min(ranked, key=lambda r: (r.objective_value(request.objective), r.candidate), default=None)
    shown = f", best {best.candidate.shorthand} {best.step_time_s:.3f} s" if best else ""
    return f"simulated {len(records)} of {len(frontier.points)} estimated{shown}"

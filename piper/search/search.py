"""The search: bounds for all, estimates where the winner may be, simulations of the most promising.

[Note: when the search may stop]
Points are estimated best bound first (`piper.search.frontier`) and simulated best estimate first, in rounds
of fixed size, so that the answer depends neither on the number of processes nor on their speed. The search
ends

* "bound": nothing that was not simulated has a bound below the best by more than the gap that is asked for;
* "estimate": what remains might be better by its bound, but its estimate, corrected by the most that any
  simulation was below its own, is no better than the best. The gap is stated all the same;
* by a limit of the request, or an interrupt.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cost_models.errors import nearest, require_positive, require_positive_int
from piper.errors import JobError
from piper.predict import Job
from piper.search.candidate import Candidate, has_values
from piper.search.choices import choices_of, require_values
from piper.search.evaluate import Evaluator, simulate_in_worker, start_worker
from piper.search.frontier import Frontier, Point
from piper.search.outcome import Outcome, SearchResult, layout_of
from piper.search.space import Space
from piper.search.status import Record, Status
from piper.strategy import Strategy, require_plannable

ROUND_SIZE = 8
"""Simulations per round; a round is what one incumbent is compared with."""

INTERRUPTED = "interrupted"

MOST_CELLS = 4096
"""Cells whose points are estimated, at most."""

OBJECTIVES = ("time", "memory", "cost")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """What to search for.

    Args:
        model, cluster, gpus, seq_len, global_batch, micro_batch, dtype, optimizer, clip_grad_norm, stack,
            mfu_convention, recipe, settings: as in `piper.predict.Job`.
        top: entries of the ranking.
        time_limit_s: stop after this long, or None.
        max_candidates: simulate at most so many, or None.
        objective: "time", "memory" or "cost" (GPU-seconds: time, at a given number of GPUs).
        jobs: processes.
        pin: dimension -> the only value allowed.
        forbid: (dimension, value) pairs to leave out.
        gap: by which share the best may be beaten, by bounds, when the search ends.
        values: dimension -> values to try instead of ours.
        why_not: dimension -> value: say how the best strategy with these values loses.
    """

    model: str
    cluster: str = "dgx-h100"
    gpus: int | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    dtype: str = "bf16"
    optimizer: str = "adamw"
    clip_grad_norm: float | None = 1.0
    stack: str = "piper"
    mfu_convention: str = "palm"
    recipe: str | None = None
    settings: tuple[tuple[str, str], ...] = ()
    top: int = 10
    time_limit_s: float | None = None
    max_candidates: int | None = None
    objective: str = "time"
    jobs: int = 1
    pin: dict[str, str] = field(default_factory=dict)
    forbid: tuple[tuple[str, str], ...] = ()
    why_not: dict[str, str] = field(default_factory=dict)
    gap: float = 0.001
    values: dict[str, tuple[int | str, ...]] = field(default_factory=dict)


def search_strategies(
    request: SearchRequest, *, on_progress: Callable[[str], None] | None = None
) -> SearchResult:
    """Return the best strategies of a job, proven by bounds, with reasons for the others.

    Args:
        request: what to search for.
        on_progress: called with one line after every round.
    Raises: JobError for a request that contradicts itself; ModelError, CostModelError as in a prediction.
    """
    started_s = time.perf_counter()
    _check(request)
    evaluator = Evaluator(job=_job(request))
    space = _space(request, evaluator)
    table = evaluator.cells(space)
    frontier = Frontier(
        table=table,
        estimator=evaluator.estimator(table),
        objective=request.objective,
        room_bytes=float(evaluator.capacity_bytes),
    )
    rounds = _Rounds(request=request, frontier=frontier, started_s=started_s, on_progress=on_progress)
    with _simulator(evaluator, request.jobs) as run:
        ended_by = rounds.run(run)
        if request.why_not and ended_by != INTERRUPTED:
            rounds.answer(request.why_not, run)
    outcome = Outcome(
        space=space,
        frontier=frontier,
        records=rounds.records,
        ended_by=ended_by,
        wall_s=time.perf_counter() - started_s,
        first_answer_s=rounds.first_answer_s,
    )
    return SearchResult.of(
        outcome,
        objective=request.objective,
        top=request.top,
        why_not=request.why_not,
        interrupted=ended_by == INTERRUPTED,
    )


Simulate = Callable[[Sequence[Candidate]], list[dict[str, Any]]]
"""Simulate candidates, one result each."""


@dataclass(kw_only=True)
class _Rounds:
    """The state of a search: what was simulated, and what waits in rising order of its estimate."""

    request: SearchRequest
    frontier: Frontier
    started_s: float
    on_progress: Callable[[str], None] | None
    records: dict[Candidate, Record] = field(default_factory=dict)
    first_answer_s: float | None = None
    grown: int = 0
    _waiting: list[Point] = field(default_factory=list)
    _points: dict[Candidate, Point] = field(default_factory=dict)

    def run(self, simulate: Simulate) -> str:
        """Estimate and simulate in turn; return what ended it."""
        try:
            while True:
                self._grow()
                reason = self._reason_to_stop()
                if reason:
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
            likely = [p.estimate for p in heapq.nsmallest(ROUND_SIZE, self._waiting) if not p.unlikely]
            if len(likely) == ROUND_SIZE:
                limit = min(limit, likely[-1])
            if self.frontier.lowest >= limit:
                return
            before = len(self.frontier.expanded)
            for point in self.frontier.grow(limit):
                self._points[point.candidate] = point
                heapq.heappush(self._waiting, point)
            self.grown += len(self.frontier.expanded) - before
            self._note_first_answer()

    def _note_first_answer(self) -> None:
        if self.first_answer_s is None and any(not point.unlikely for point in self._waiting[:1]):
            self.first_answer_s = time.perf_counter() - self.started_s

    def answer(self, wanted: Mapping[str, str], simulate: Simulate) -> None:
        """Simulate the most promising point with some values, if none was."""
        if any(has_values(candidate, wanted) for candidate in self.records):
            return
        points = [p for p in self.frontier.points if has_values(p.candidate, wanted)]
        if not points:
            points = [p for p in self.frontier.estimate_one_with(wanted) if has_values(p.candidate, wanted)]
        if points:
            self._run([min(points)], simulate)

    def _simulate(self, simulate: Simulate) -> None:
        """Simulate a round of the points with the best estimates that may still enter the ranking."""
        limit = self.best * (1 - self.request.gap) if self._is_full() else float("inf")
        batch: list[Point] = []
        while self._waiting and len(batch) < self._room():
            point = heapq.heappop(self._waiting)
            if point.bound < limit:
                batch.append(point)
        self._run(batch, simulate)

    def _run(self, batch: Sequence[Point], simulate: Simulate) -> None:
        found = simulate([point.candidate for point in batch]) if batch else []
        for point, result in zip(batch, found, strict=True):
            self._points[point.candidate] = point
            self.records[point.candidate] = _simulated(point, result)
        if self.on_progress is not None:
            self.on_progress(_progress(self.request, self.records, self.frontier))

    def _reason_to_stop(self) -> str:
        best, full = self.best, self._is_full()
        limit = best * (1 - self.request.gap)
        open_points = [point for point in self._waiting if not full or point.bound < limit]
        if (
            not open_points
            and (full or not self._waiting)
            and self.frontier.lowest >= (limit if full else float("inf"))
        ):
            return "bound"
        if self._is_late() and self.records:
            return "time_limit"
        if self._room() <= 0:
            return "max_candidates"
        if full and not self._promising(open_points, best) and (self._grown_enough(best) or self._is_spent()):
            return "estimate"
        return "" if open_points else "estimate" if self._is_spent() else ""

    def _is_full(self) -> bool:
        return len({layout_of(record.candidate) for record in self._ranked()}) >= self.request.top

    def _is_spent(self) -> bool:
        return self.grown >= MOST_CELLS

    def _grown_enough(self, best: float) -> bool:
        """Return whether cells that were never estimated are no better than the best, corrected."""
        return self.frontier.lowest * self._correction() >= best

    def _promising(self, points: Sequence[Point], best: float) -> bool:
        correction = self._correction()
        return any(not point.unlikely and point.estimate * correction < best for point in points)

    def _correction(self) -> float:
        """Return the smallest ratio of a simulation to its estimate: how much better one may turn out."""
        ratios = [
            record.objective_value(self.request.objective) / self._points[candidate].estimate
            for candidate, record in self.records.items()
            if record.status is Status.RANKED
        ]
        return min(ratios, default=1.0) if len(ratios) >= ROUND_SIZE else 1.0

    def _is_late(self) -> bool:
        limit_s = self.request.time_limit_s
        return limit_s is not None and bool(self._points) and time.perf_counter() - self.started_s > limit_s

    def _room(self) -> int:
        if self.request.max_candidates is None:
            return ROUND_SIZE
        return min(ROUND_SIZE, self.request.max_candidates - len(self.records))


def _check(request: SearchRequest) -> None:
    require_positive_int(
        request.top, where="--top", field="top", fix="give a number such as 10", error=JobError
    )
    require_positive_int(
        request.jobs, where="--jobs", field="jobs", fix="give a number such as 2", error=JobError
    )
    if request.max_candidates is not None:
        require_positive_int(
            request.max_candidates,
            where="--max-candidates",
            field="max_candidates",
            fix="such as 100",
            error=JobError,
        )
    if request.time_limit_s is not None:
        require_positive(
            request.time_limit_s,
            where="--time-limit",
            field="time_limit",
            fix="give seconds, such as 30",
            error=JobError,
        )
    if request.objective not in OBJECTIVES:
        raise JobError(
            where="--objective", field="objective", value=request.objective, rule="is not known",
            fix=nearest(request.objective, OBJECTIVES),
        )  # fmt: skip


def _job(request: SearchRequest) -> Job:
    from cost_models import load_cluster

    gpus = request.gpus or load_cluster(request.cluster).gpus_per_node
    require_plannable(gpus)
    return Job(
        model=request.model,
        strategy=Strategy(),
        cluster=request.cluster,
        gpus=gpus,
        seq_len=request.seq_len,
        global_batch=request.global_batch or 8 * gpus,
        dtype=request.dtype,
        optimizer=request.optimizer,
        clip_grad_norm=request.clip_grad_norm,
        stack=request.stack,
        mfu_convention=request.mfu_convention,
        recipe=request.recipe,
        settings=request.settings,
    )


def _space(request: SearchRequest, evaluator: Evaluator) -> Space:
    pin = dict(request.pin)
    if request.micro_batch is not None:
        if pin.get("micro_batch", str(request.micro_batch)) != str(request.micro_batch):
            raise JobError(
                where="--micro-batch", field="micro_batch", value=request.micro_batch,
                rule=f"contradicts --pin micro_batch={pin['micro_batch']}", fix="give it once, or equal",
            )  # fmt: skip
        pin["micro_batch"] = str(request.micro_batch)
    require_values(tuple(request.why_not.items()), where="--why-not")
    limits = evaluator.limits
    choices = choices_of(
        gpus=(evaluator.job.gpus or 1,),
        num_units=limits.num_units,
        experts=limits.experts,
        cuts_tensors=limits.cuts_tensors,
        cuts_sequences=limits.cuts_sequences,
        pin=pin,
        forbid=request.forbid,
        values=request.values,
    )
    space = evaluator.space(choices)
    if not space.num_candidates:
        reasons = sorted({reason for _, reason in space.illegal})
        if not reasons:
            pinned = " and ".join(f"{name}={value}" for name, value in pin.items())
            gpus = evaluator.job.gpus
            reasons = [f"nothing has {pinned} on {gpus} GPUs" if pinned else "everything is forbidden"]
        raise JobError(
            where="search",
            field="space",
            value=space.size,
            rule="has no legal strategy: " + "; ".join(reasons[:3]),
            fix="change --global-batch or --gpus, or pin and forbid less",
        )
    return space


@contextmanager
def _simulator(evaluator: Evaluator, jobs: int) -> Iterator[Simulate]:
    if jobs == 1:
        yield lambda batch: [evaluator.simulate(candidate) for candidate in batch]
        return
    with ProcessPoolExecutor(jobs, initializer=start_worker, initargs=(evaluator.job,)) as pool:
        yield lambda batch: [r for part in pool.map(simulate_in_worker, [[c] for c in batch]) for r in part]


def _simulated(point: Point, result: dict[str, Any]) -> Record:
    bound_s, candidate = point.bound_s, point.candidate
    if result["fits"]:
        return Record(candidate=candidate, status=Status.RANKED, bound_s=bound_s, result=result)
    used = result["needed_memory_bytes"] / 2**30
    return Record(
        candidate=candidate,
        status=Status.OUT_OF_MEMORY,
        bound_s=bound_s,
        result=result,
        reason=f"needs {used:.1f} GiB of {result['device_memory_bytes'] / 2**30:.1f} GiB",
    )


def _progress(request: SearchRequest, records: dict[Candidate, Record], frontier: Frontier) -> str:
    ranked = [r for r in records.values() if r.status is Status.RANKED]
    best = min(ranked, key=lambda r: (r.objective_value(request.objective), r.candidate), default=None)
    shown = f", best {best.candidate.shorthand} {best.step_time_s:.3f} s" if best else ""
    return f"simulated {len(records)} of {len(frontier.points)} estimated{shown}"

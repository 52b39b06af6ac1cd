"""The search: bounds for all candidates, simulations best bound first, reasons for the rest.

[Note: when the search may stop]
Candidates are simulated in rising order of their bound, in rounds of fixed size. Once the ranking is full
and the next bound is no better than its last entry, nothing left can enter the ranking: those are "bounded
out". Rounds do not depend on the number of processes, so neither does the answer.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cost_models.errors import nearest, require_positive, require_positive_int
from piper.errors import JobError
from piper.predict import Job
from piper.search.evaluate import Bounds, Evaluator, simulate_in_worker, start_worker
from piper.search.outcome import Outcome, Record, SearchResult, Status
from piper.search.space import Candidate, Space, enumerate_space, require_values
from piper.strategy import Strategy, require_plannable

ROUND_SIZE = 8
"""Simulations per round; a round is what one incumbent is compared with."""

INTERRUPTED = "interrupted"

BOUNDS_SHARE = 0.5
"""Share of a time limit that bounds may take; the rest is for simulations."""

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
    bounds, cut_short = _bounds(request, evaluator, space.candidates, started_s=started_s)
    rounds = _Rounds(request=request, bounds=bounds, started_s=started_s, on_progress=on_progress)
    ended_by = cut_short
    if cut_short != INTERRUPTED:
        with _simulator(evaluator, request.jobs) as run:
            ended_by = rounds.simulate(run)
    if ended_by in {"bound", "exhausted"}:
        ended_by = cut_short or ended_by
    outcome = Outcome(
        space=space,
        bounds=bounds,
        records=rounds.records | rounds.unsimulated(ended_by) | _unprobed(space, bounds),
        ended_by=ended_by,
        wall_s=time.perf_counter() - started_s,
    )
    return SearchResult.of(
        outcome,
        objective=request.objective,
        top=request.top,
        why_not=request.why_not,
        interrupted=ended_by == INTERRUPTED,
    )


def _bounds(
    request: SearchRequest, evaluator: Evaluator, candidates: Sequence[Candidate], *, started_s: float
) -> tuple[dict[Candidate, Bounds], str]:
    """Return bounds of all candidates, or of as many as half the time limit allows, and what cut it short."""
    found: dict[Candidate, Bounds] = {}
    for candidate in candidates:
        spent_s = time.perf_counter() - started_s
        if found and request.time_limit_s is not None and spent_s > BOUNDS_SHARE * request.time_limit_s:
            return found, "time_limit"
        try:
            found[candidate] = evaluator.bounds(candidate)
        except KeyboardInterrupt:
            return found, INTERRUPTED
    return found, ""


def _unprobed(space: Space, bounds: dict[Candidate, Bounds]) -> dict[Candidate, Record]:
    """Return the records of candidates that no bound is known of."""
    return {
        c: Record(candidate=c, status=Status.NOT_REACHED, reason=str(Status.NOT_REACHED))
        for c in space.candidates
        if c not in bounds
    }


Simulate = Callable[[Sequence[Candidate]], list[dict[str, Any]]]
"""Simulate candidates, one result each."""


@dataclass(kw_only=True)
class _Rounds:
    """The state of a search: what is known, and what waits in rising order of its bound."""

    request: SearchRequest
    bounds: dict[Candidate, Bounds]
    started_s: float
    on_progress: Callable[[str], None] | None
    records: dict[Candidate, Record] = field(init=False)
    waiting: list[Candidate] = field(init=False)

    def __post_init__(self) -> None:
        self.records = {c: _too_big(c, b) for c, b in self.bounds.items() if not b.fits}
        fitting = (c for c in self.bounds if c not in self.records)
        self.waiting = sorted(fitting, key=lambda c: (self.bounds[c].value_of(self.request.objective), c))

    def simulate(self, run: Simulate) -> str:
        """Simulate round by round; return what ended it."""
        while self.waiting:
            reason = self._reason_to_stop()
            if reason:
                return reason
            batch = self.waiting[: self._room()]
            try:
                found = run(batch)
            except KeyboardInterrupt:
                return INTERRUPTED
            del self.waiting[: len(batch)]
            self.records |= {c: _simulated(c, result) for c, result in zip(batch, found, strict=True)}
            if self.on_progress is not None:
                self.on_progress(_progress(self.request, self.records, self.waiting))
        return "exhausted"

    def unsimulated(self, ended_by: str) -> dict[Candidate, Record]:
        """Return the records of what was left waiting."""
        status = Status.BOUND if ended_by == "bound" else Status.NOT_REACHED
        return {
            c: Record(candidate=c, status=status, bound_s=self.bounds[c].step_time_s, reason=str(status))
            for c in self.waiting
        }

    def _reason_to_stop(self) -> str:
        if _cannot_improve(self.request, self.records, self.bounds[self.waiting[0]]):
            return "bound"
        limit_s, begun = self.request.time_limit_s, any(r.result is not None for r in self.records.values())
        if limit_s is not None and begun and time.perf_counter() - self.started_s > limit_s:
            return "time_limit"
        return "" if self._room() > 0 else "max_candidates"

    def _room(self) -> int:
        if self.request.max_candidates is None:
            return ROUND_SIZE
        done = sum(1 for record in self.records.values() if record.result is not None)
        return min(ROUND_SIZE, self.request.max_candidates - done)


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
    space = enumerate_space(
        gpus=evaluator.job.gpus or 1,
        num_units=evaluator.num_units,
        global_batch=evaluator.job.global_batch or 1,
        pin=pin,
        forbid=request.forbid,
    )
    if not space.candidates:
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


def _cannot_improve(request: SearchRequest, records: dict[Candidate, Record], bounds: Bounds) -> bool:
    values = sorted(
        r.objective_value(request.objective) for r in records.values() if r.status is Status.RANKED
    )
    return len(values) >= request.top and bounds.value_of(request.objective) >= values[request.top - 1]


@contextmanager
def _simulator(evaluator: Evaluator, jobs: int) -> Iterator[Simulate]:
    if jobs == 1:
        yield lambda batch: [evaluator.simulate(candidate) for candidate in batch]
        return
    with ProcessPoolExecutor(jobs, initializer=start_worker, initargs=(evaluator.job,)) as pool:
        yield lambda batch: [r for part in pool.map(simulate_in_worker, [[c] for c in batch]) for r in part]


def _too_big(candidate: Candidate, bounds: Bounds) -> Record:
    over = (bounds.memory_bytes - bounds.capacity_bytes) / 2**30
    return Record(
        candidate=candidate,
        status=Status.MEMORY_BOUND,
        bound_s=bounds.step_time_s,
        reason=f"needs at least {bounds.memory_bytes / 2**30:.1f} GiB on pipeline rank {bounds.worst_rank}, "
        f"{over:.1f} GiB more than a device has",
    )


def _simulated(candidate: Candidate, result: dict[str, Any]) -> Record:
    if result["fits"]:
        return Record(candidate=candidate, status=Status.RANKED, result=result)
    used = result["needed_memory_bytes"] / 2**30
    return Record(
        candidate=candidate,
        status=Status.OUT_OF_MEMORY,
        result=result,
        reason=f"needs {used:.1f} GiB of {result['device_memory_bytes'] / 2**30:.1f} GiB",
    )


def _progress(request: SearchRequest, records: dict[Candidate, Record], waiting: list[Candidate]) -> str:
    counts = Counter(record.status for record in records.values())
    ranked = [r for r in records.values() if r.status is Status.RANKED]
    best = min(ranked, key=lambda r: (r.objective_value(request.objective), r.candidate), default=None)
    shown = f", best {best.candidate.shorthand} {best.step_time_s:.3f} s" if best else ""
    return f"simulated {counts[Status.RANKED] + counts[Status.OUT_OF_MEMORY]}, {len(waiting)} waiting{shown}"

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

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from cost_models.errors import require_known, require_positive, require_positive_int
from piper.errors import JobError
from piper.predict import Job
from piper.search.along_front import simulate_along_front
from piper.search.asked import choices_asked, infeasible, memory_conflict, why_illegal
from piper.search.choices import require_values
from piper.search.evaluate import Evaluator
from piper.search.executors import EXECUTORS
from piper.search.frontier import NEAR, Frontier
from piper.search.outcome import Outcome, SearchResult
from piper.search.robustness import STRATEGIES, robustness_of
from piper.search.rounds import INTERRUPTED, Rounds
from piper.search.several import MOST_NODES, search_several
from piper.search.simulations import Means, simulations
from piper.search.space import Space
from piper.strategy import Strategy, require_plannable

SEEDS: dict[str, tuple[int | str, ...]] = {
    "schedule": ("1f1b", "interleaved_1f1b"),
    "vp": (1, 2, 4),
    "cp": (1,),
    "micro_batch": (1, 2),
    "sp": ("on",),
    "async_tp": ("off",),
    "recompute": ("none", "full"),
    "zero": (1,),
    "hsdp": (0,),
    "offload": ("none",),
    "bucket_mb": (0,),
    "prefetch": (0,),
    "cut": ("balanced",),
}
"""What is tried for a first answer: the ways that people try first."""

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
        jobs: simulations that run at once.
        executor, db, resume: see `piper.search.simulations.Means`.
        pin: dimension -> the only value allowed.
        forbid: (dimension, value) pairs to leave out.
        gap: by which share the best may be beaten, by bounds, when the search ends.
        values: dimension -> values to try instead of ours.
        reserve_bytes: of every device, to leave free.
        only_runnable: whether only what `piper run` executes may win.
        why_not: dimension -> value: say how the best strategy with these values loses.
        gpu_counts: numbers of GPUs to search at, instead of one; see `piper.search.several`.
        min_gpus: search for the fewest GPUs, up to `gpus`, or of `gpu_counts`.
        target_step_time_s: what is slower is no answer where there are several numbers of GPUs.
        front: simulate up to so many more strategies that may be on the Pareto front.
        robustness: say whether the winner stays the best on hardware that is 10 % off.
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
    executor: str = "local"
    db: str | None = None
    resume: bool = False
    pin: dict[str, str] = field(default_factory=dict)
    forbid: tuple[tuple[str, str], ...] = ()
    why_not: dict[str, str] = field(default_factory=dict)
    gap: float = 0.001
    values: dict[str, tuple[int | str, ...]] = field(default_factory=dict)
    reserve_bytes: int = 0
    only_runnable: bool = False
    gpu_counts: tuple[int, ...] = ()
    min_gpus: bool = False
    target_step_time_s: float | None = None
    robustness: bool = False
    front: int = 0


def search_strategies(
    request: SearchRequest, *, on_progress: Callable[[str], None] | None = None
) -> SearchResult:
    """Return the best strategies of a job, proven by bounds, with reasons for the others.

    Args:
        request: what to search for.
        on_progress: called with one line after every round.
    Raises: JobError for a request that contradicts itself; ModelError, CostModelError as in a prediction.
    """
    _check(request)
    if not (request.gpu_counts or request.min_gpus):
        return _search_one(request, on_progress=on_progress)
    from cost_models import load_cluster

    cluster = load_cluster(request.cluster)
    return search_several(
        request,
        lambda asked: _search_one(asked, on_progress=on_progress),
        node=cluster.gpus_per_node,
        most_nodes=cluster.max_nodes or MOST_NODES,
    )


def _search_one(request: SearchRequest, *, on_progress: Callable[[str], None] | None) -> SearchResult:
    """Search at one number of GPUs."""
    started_s = time.perf_counter()
    evaluator = Evaluator(
        job=_job(request), reserve_bytes=request.reserve_bytes, only_runnable=request.only_runnable
    )
    space = _space(request, evaluator)
    first_answer_s = _first_answer(request, evaluator, started_s=started_s, report=on_progress)
    frontier = _frontier(request, evaluator, space)
    rounds = Rounds(request=request, frontier=frontier, started_s=started_s, on_progress=on_progress)
    means = Means(jobs=request.jobs, executor=request.executor, db=request.db, resume=request.resume)
    with simulations(evaluator, means) as run:
        ended_by = rounds.run(run)
        if ended_by != INTERRUPTED:
            if request.front:
                simulate_along_front(rounds, request.front, run)
            if request.why_not:
                rounds.answer(request.why_not, run)
    outcome = Outcome(
        space=space,
        frontier=frontier,
        records=rounds.records,
        ended_by=ended_by,
        wall_s=time.perf_counter() - started_s,
        first_answer_s=first_answer_s,
    )
    found = SearchResult.of(
        outcome,
        objective=request.objective,
        top=request.top,
        why_not=request.why_not,
        interrupted=ended_by == INTERRUPTED,
        target_step_time_s=request.target_step_time_s,
    )
    if found.summary.get("why_not", {}).get("status") == "illegal":
        reason = why_illegal(request, evaluator)
        why_not = found.summary["why_not"] | {"reason": reason}
        found = replace(found, summary=found.summary | {"why_not": why_not})
    if found.summary["best"] is None and not found.summary["simulated"]:
        conflict = memory_conflict(request, evaluator)
        found = replace(found, summary=found.summary | {"conflict": conflict})
    if request.robustness and not found.interrupted:
        first = [record.candidate for record in outcome.diverse(request.objective)[:STRATEGIES]]
        checked = robustness_of(first[0], first[1:], evaluator) if first else None
        found = replace(found, summary=found.summary | {"robustness": checked})
    return found


def _first_answer(
    request: SearchRequest,
    evaluator: Evaluator,
    *,
    started_s: float,
    report: Callable[[str], None] | None,
) -> float | None:
    """Estimate the usual strategies; return after how many seconds the best one was known, or None."""
    stated = {*request.pin, *request.values, *(name for name, _ in request.forbid)}
    stated |= {"micro_batch"} if request.micro_batch is not None else set()
    space = evaluator.space(
        choices_asked(request, evaluator, seeds={n: v for n, v in SEEDS.items() if n not in stated})
    )
    if not space.num_candidates:
        return None
    frontier = _frontier(request, evaluator, space)
    while not any(not p.unlikely for p in frontier.points) and frontier.lowest < float("inf"):
        frontier.grow(frontier.lowest * NEAR)
    likely = min((p for p in frontier.points if not p.unlikely), default=None)
    if likely is None:
        return None
    if report is not None:
        report(f"first: {likely.candidate.shorthand}, estimated at {likely.estimate:.3f}")
    return time.perf_counter() - started_s


def _frontier(request: SearchRequest, evaluator: Evaluator, space: Space) -> Frontier:
    table = evaluator.cells(space)
    return Frontier(
        table=table,
        estimator=evaluator.estimator(table),
        objective=request.objective,
        room_bytes=float(evaluator.capacity_bytes),
    )


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
    _check_counts(request)
    _check_beside_memory(request)
    require_known(request.objective, OBJECTIVES, where="--objective", field="objective", error=JobError)
    require_known(request.executor, list(EXECUTORS), where="--executor", field="executor", error=JobError)
    if request.resume and request.db is None:
        raise JobError(
            where="command line", field="--resume", value="(no file)",
            rule="needs what an earlier search kept", fix="name its file with --db",
        )  # fmt: skip


def _check_counts(request: SearchRequest) -> None:
    for gpus in request.gpu_counts:
        require_positive_int(
            gpus, where="--gpus", field="gpus", fix="give numbers such as 32,64", error=JobError
        )
    if request.gpu_counts and request.gpus is not None:
        raise JobError(
            where="search", field="gpus", value=request.gpus,
            rule=f"is stated beside gpu_counts = {request.gpu_counts}", fix="give one of the two",
        )  # fmt: skip
    if request.target_step_time_s is not None:
        require_positive(
            request.target_step_time_s,
            where="--target-step-time",
            field="target_step_time",
            fix="give seconds, such as 20",
            error=JobError,
        )
        if request.objective == "memory":
            raise JobError(
                where="--target-step-time", field="objective", value="memory",
                rule="is not looked for among strategies within a step time",
                fix="take --objective time or cost, and read the Pareto front",
            )  # fmt: skip


def _check_beside_memory(request: SearchRequest) -> None:
    if request.front and request.objective == "memory":
        raise JobError(
            where="--front", field="objective", value="memory",
            rule="is not what the front is looked for beside", fix="take --objective time or cost",
        )  # fmt: skip
    if request.robustness and request.objective == "memory":
        raise JobError(
            where="--robustness", field="objective", value="memory",
            rule="does not depend on rates of kernels and links", fix="take --objective time or cost",
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
    require_values(tuple(request.why_not.items()), where="--why-not")
    choices = choices_asked(request, evaluator, seeds={})
    space = evaluator.space(choices)
    if not space.num_candidates:
        raise infeasible(request, evaluator)
    return space

"""A job with many microbatches, predicted from plans with few of them.

The rows of some schedules for m + period microbatches are those for m with one more period in the middle. A
short run shows whether the simulation follows them, and what a period adds (`simulator.repetition`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from piper.laps import Clock
from piper.strategy import Resolved

if TYPE_CHECKING:
    from cost_models.price import CostModel
    from simulator.plan import Plan
    from simulator.repetition import Repetition
    from simulator.timeline.timeline import Timeline

TOLERANCE = 1e-6
"""Largest relative error of a step time that is called the same."""


def _one(_: int) -> int:
    return 1


def _round(num_pipeline_ranks: int) -> int:
    """Return the microbatches of a round (`piper.schedules.alternating`, [Note: rounds])."""
    return num_pipeline_ranks


PERIODS: dict[str, Callable[[int], int]] = {
    "1f1b": _one,
    "interleaved_1f1b": _round,
    "interleaved_zb": _round,
    "zb_h1": _one,
    "zb_h2": _one,
    "v_half": _one,
    "v_min": _one,
    "dualpipe_v": _one,
}
"""Schedules that repeat themselves, and after how many microbatches on so many pipeline ranks. Others run all
forwards before all backwards, number microbatches from both ends, or weigh what passes cost."""

SAME_KINDS = frozenset({*PERIODS, "gpipe", "looped_bfs", "zb_1p", "zb_2p", "zbv"})
"""Schedules with the same passes on the same ranks for all numbers of microbatches."""

_ROUNDS_TO_SETTLE = 3
_LOOSE, _ROUNDS_IF_LOOSE = 1e-4, 2
_PERIODS_TO_SEE = 2
"""Of the first short plan: pp microbatches each, and periods beyond them (found by trying: 1F1B on 2 to 16
ranks settles within 3 pp microbatches, with contention, and to 1e-4 mostly within 2 pp)."""
_GROWTH = 2
_LARGEST_SHARE = 0.6
"""Of the job's microbatches that a short plan may have: what does not repeat itself by then is done whole."""


def period_of(resolved: Resolved) -> int | None:
    """Return after how many microbatches a job repeats itself, or None: it does not."""
    if resolved.strategy.directives or len(set(resolved.sizes)) > 1:
        return None
    period_on = PERIODS.get(resolved.schedule)
    if period_on is None or len(resolved.sizes) % period_on(resolved.pp):
        return None
    return period_on(resolved.pp)


def takes_other_counts(resolved: Resolved) -> bool:
    """Return whether all but the order of a job stays with other numbers of microbatches."""
    known = not resolved.strategy.directives and resolved.schedule in SAME_KINDS
    return known and len(set(resolved.sizes)) == 1


def short_counts(resolved: Resolved, *, tolerance: float = TOLERANCE) -> Iterator[int]:
    """Yield numbers of microbatches to try in turn; whole periods and rounds less than the job's."""
    rounds = _ROUNDS_IF_LOOSE if tolerance >= _LOOSE else _ROUNDS_TO_SETTLE
    period, number = period_of(resolved), len(resolved.sizes)
    if period is None:
        return
    wanted = rounds * resolved.pp + _PERIODS_TO_SEE * period + 2
    while (count := wanted + (number - wanted) % resolved.pp) <= _LARGEST_SHARE * number:
        yield count
        wanted *= _GROWTH


def with_microbatches(resolved: Resolved, count: int) -> Resolved:
    """Return a job with the first `count` microbatches of this one."""
    sizes = resolved.sizes[:count]
    return replace(resolved, sizes=sizes, global_batch=sum(sizes) * resolved.dp)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Short:
    """A simulated job.

    Args:
        plan, timeline: of the first microbatches only.
        result: of all, as `simulator.summarize` returns it, with timings_s.
    """

    plan: Plan
    timeline: Timeline
    result: dict[str, Any]


def simulate_short(
    resolved: Resolved,
    compile_first: Callable[[int], Plan],
    cost_model: CostModel,
    *,
    steps: int | str = "auto",
    engine: str = "auto",
    convention: str = "palm",
    tolerance: float = TOLERANCE,
) -> Short | None:
    """Simulate a job by plans with fewer microbatches, or return None: it does not repeat itself soon enough.

    Args:
        resolved: the job.
        compile_first: returns the plan of the job's first microbatches.
        cost_model: prices.
        steps, engine: as `simulator.simulate` takes them.
        convention: how model FLOPs are counted.
        tolerance: largest error of the step time beside the simulation of the whole job, relative. Reserved
            bytes are those of the short plan.
    """
    from simulator import build_workload, simulate, summarize
    from simulator.simulation import steps_needed

    clock = Clock()
    for count in short_counts(resolved, tolerance=tolerance):
        plan = compile_first(count)
        clock.lap("compile")
        workload = build_workload(plan, cost_model)
        clock.lap("price")
        run = partial(simulate, plan, cost_model, engine=engine, workload=workload)
        timeline = run(steps=steps)
        repetition = _repetition(resolved, plan, timeline, tolerance=tolerance)
        if repetition is not None and steps == "auto":
            needed = steps_needed(repetition.step_ends_ns(timeline.step_end_ns).tolist())
            if needed is None:
                return None
            if needed < timeline.num_steps:
                timeline = run(steps=needed)
                repetition = _repetition(resolved, plan, timeline, tolerance=tolerance)
        clock.lap("simulate")
        if repetition is not None:
            result = summarize(
                plan, timeline, cost_model, workload=workload, convention=convention, repetition=repetition
            )
            clock.lap("summarize")
            result["warnings"] = [_said(resolved, count), *result["warnings"]]
            return Short(plan=plan, timeline=timeline, result=result | {"timings_s": clock.laps_s})
    return None


def _repetition(resolved: Resolved, plan: Plan, timeline: Timeline, *, tolerance: float) -> Repetition | None:
    from simulator.repetition import find_repetition

    number = plan.training.num_microbatches
    left_out = len(resolved.sizes) - number
    # Equal stages may wait for each other in turn, so that only what a whole pipeline holds is a period; and
    # where contention never settles quite, the mean of many microbatches differs less.
    longest = (number - resolved.pp) // 2
    rounds = [length for length in range(resolved.pp, longest + 1, resolved.pp) if left_out % length == 0]
    for period in sorted({period_of(resolved) or resolved.pp, *rounds}):
        found = find_repetition(
            plan,
            timeline,
            microbatches=period,
            times=left_out // period,
            tokens_per_step=plan.training.tokens_per_step // number * len(resolved.sizes),
            tolerance=tolerance,
        )
        if found is not None:
            return found
    return None


def _said(resolved: Resolved, count: int) -> str:
    return (
        f"simulated with {count} of {len(resolved.sizes)} microbatches: the step repeats itself by then, and "
        "the others are added; bytes reserved are those of the shorter step"
    )

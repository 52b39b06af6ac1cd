"""From a study to what people read: a `Timeline` of the run that is shown, and the section of the result."""

from __future__ import annotations

from typing import Any

import numpy as np

from simulator.jitter.spec import written
from simulator.jitter.study import MOST_CONTENDED, Blame, Study
from simulator.plan import Plan
from simulator.simulation import has_settled, rank_track
from simulator.timeline.timeline import Timeline
from simulator.workload import Workload

QUANTILES = {"p5": 0.05, "p50": 0.5, "p95": 0.95, "p99": 0.99}


def timeline_of(plan: Plan, workload: Workload, study: Study) -> Timeline:
    """Return the timeline of the run that a study shows; a track is of the lowest rank of a unit."""
    units, shown = study.units, study.shown
    tracks = []
    for unit, ranks in study.stands_for.items():
        number = int(units.device[unit])
        first, last = workload.device_starts[number : number + 2].tolist()
        track = rank_track(
            plan.device_plans[number],
            shown.recorded[unit],
            rank=int(units.first_rank[unit]),
            n_devices=ranks,
            codes=workload.codes[first:last],
        )
        tracks.append(track)
    return Timeline(
        source="simulated",
        tracks=tuple(tracks),
        step_end_ns=shown.step_end_ns,
        warnings=tuple(_notices(plan, study)),
    )


def _notices(plan: Plan, study: Study) -> list[str]:
    """Return what the reader of the figures should know."""
    found = list(study.notices)
    if study.contended is False:
        found.append(
            "jitter: work that shares links or processors is timed as if it were alone, since the ranks have "
            f"more than {MOST_CONTENDED:,} tasks a step together"
        )
    units = study.units
    if study.is_random and study.draws_per_group and int(units.num_ranks.max()) > 1:
        found.append("jitter: the ranks of a tensor-parallel group draw together (per=rank: each for itself)")
    if len(study.stands_for) < units.num_units:
        found.append(
            f"jitter: breakdown and bubble are means over {len(study.stands_for)} ranks that stand for all "
            f"{plan.num_ranks}"
        )
    if not study.is_random and not has_settled(study.shown.step_end_ns.tolist()):
        found.append("jitter: the step time had not settled after the last step")
    return found


def section_of(study: Study) -> dict[str, Any]:
    """Return the key `jitter` of the result: what was asked, the distribution, and who is to blame."""
    steps_s = study.step_ns / 1e9
    undisturbed_s = study.undisturbed_ns / 1e9
    quantiles = dict(zip(QUANTILES, np.quantile(steps_s, list(QUANTILES.values())).tolist(), strict=True))
    mean_s = float(steps_s.mean())
    units, shown = study.units, study.shown
    begin_ns = int(shown.step_end_ns[-2]) if len(shown.step_end_ns) > 1 else 0
    return {
        "spec": ";".join(written(clause) for clause in study.clauses),
        "seed": study.sampling.seed,
        "runs": study.sampling.runs,
        "steps": len(shown.step_end_ns),
        "n_units": units.num_units,
        "undisturbed_step_time_s": undisturbed_s,
        "step_time_s": {
            "mean": mean_s, "min": float(steps_s.min()), **quantiles, "max": float(steps_s.max()),
        },
        "slowdown": mean_s / undisturbed_s if undisturbed_s else 1.0,
        "step_times_s": steps_s.tolist(),
        "clauses": [
            {"clause": written(clause), "costs_s": cost / 1e9}
            for clause, cost in zip(study.clauses, study.cost_ns, strict=True)
        ],
        "blame": [_blame(blame) for blame in study.blames],
        "shown_seed": study.shown_seed,
        "units": {
            "first_rank": units.first_rank.tolist(),
            "n_ranks": units.num_ranks.tolist(),
            "step_end_s": ((shown.unit_end_ns[-1] - begin_ns) / 1e9).tolist(),
            "waits_s": (study.waited_ns / 1e9).tolist(),
            "waited_for_s": (study.caused_ns / 1e9).tolist(),
        },
    }  # fmt: skip


def _blame(blame: Blame) -> dict[str, Any]:
    return {
        "ranks": ranks_text(blame.ranks),
        "first_rank": blame.ranks[0],
        "n_ranks": len(blame.ranks),
        "pipeline_rank": blame.pipeline_rank,
        "node": blame.node,
        "waited_for_s": blame.caused_ns / 1e9,
        "excess_s": blame.excess_ns / 1e9,
        "waits_s": blame.waited_ns / 1e9,
        "saves_s": None if blame.saved_ns is None else blame.saved_ns / 1e9,
    }


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Return ranks in short: 17, 16-23, or the first few ranges."""
    numbers = np.array(ranks)
    borders = np.flatnonzero(np.diff(numbers) > 1)
    firsts = numbers[np.concatenate([[0], borders + 1])].tolist()
    lasts = numbers[np.concatenate([borders, [len(numbers) - 1]])].tolist()
    spans = [str(a) if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts, strict=True)]
    return ",".join(spans[:MOST_SPANS]) + (",..." if len(spans) > MOST_SPANS else "")


MOST_SPANS = 3

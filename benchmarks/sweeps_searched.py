"""The search itself in the space of a published sweep: what it picks where it may combine the values freely.

[Note: free search inside a sweep]
The space has, in every dimension of the layouts, the values that occur in the sweep (degrees, microbatches,
schedule, stages per rank, recomputation, sharding), and in every other one the value that the runs were made
with. The search may combine them as no run did. Of its ranking (the strategies that it simulated and that
fit, best first)

* "measured": the pick was run. Its regret is that of the sweep.
* "oom": it was run, and did not fit.
* "not_measured": nobody ran it, so there is no regret. We state instead the regret of the first of the
  ranking that was run, which is what a user with these runs would have got, and by how much the pick is
  predicted to be faster than the best run (`promised`): a claim, not a result.

`rank_of_best` is the place of the best run in the ranking, in which strategies that differ only in how states
are kept, sp or async_tp have one place; none: the search ended without simulating it.

`missed` is by how much the pick is predicted to be slower than the fastest run that is predicted to fit: a
search that finds what its own simulator says is the best has none.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from cost_models.errors import InputError
from piper.search.search import SearchRequest, search_strategies
from piper.strategy import Shorthand, Strategy
from piper.validation.halves import fitted_to
from piper.validation.jobs_of_rows import RowJob, job_of_row
from piper.validation.overlay import overlaid
from piper.validation.predictions import RowPrediction
from piper.validation.rows import PublishedRow

Values = dict[str, tuple[int | str, ...]]
Layout = tuple[int | str, ...]

TOP = 5
_TRIED = 10_000
"""Entries of a ranking: all that was simulated."""
_OTHER_HALF = {"a": "b", "b": "a"}
_HABITS: Values = {"offload": ("none",), "bucket_mb": (0,), "prefetch": (0,), "cut": ("even",)}
"""What the runs leave to their frameworks, as it is predicted for them."""
_NUMBERS = ("tp", "pp", "cp", "dp", "vp", "ep", "etp")
_NUM_SHOWN = 10
"""Leading fields of a layout that make a place of its own in a ranking."""
_MOST_S = 120.0
"""Of a search; the spaces have up to some thousand strategies."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is known of a layout that was run: seconds of a step (infinite: no fit), and the prediction."""

    step_time_s: float
    predicted_s: float
    fits: bool


def layout(stated: Shorthand, *, micro_batch: int) -> Layout:
    """Return what tells layouts apart: what changes nothing where it is said is left out."""
    tp, pp, cp, dp = (getattr(stated, name) or 1 for name in ("tp", "pp", "cp", "dp"))
    ep = stated.ep or 1
    zero = (stated.zero or 0) if dp * cp > 1 else 0
    return (
        tp, pp, cp, dp, ep,
        (stated.etp or 1) if ep > 1 else 1,
        (stated.vp or 1) if pp > 1 else 1,
        (stated.schedule or "1f1b") if pp > 1 else "1f1b",
        stated.recompute or "none",
        micro_batch,
        zero,
        (stated.hsdp or 0) if zero else 0,
        (stated.sp or "on") if tp > 1 else "on",
        (stated.async_tp or "off") if tp > 1 else "off",
    )  # fmt: skip


def values_of(jobs: Sequence[RowJob]) -> Values:
    """Return, for every dimension of a search, the values that occur in runs."""
    stated = [each.job.strategy.stated for each in jobs]
    found: dict[str, set[int | str]] = defaultdict(set)
    for each, said in zip(jobs, stated, strict=True):
        for name in _NUMBERS:
            found[name].add(getattr(said, name) or 1)
        found["micro_batch"].add(each.job.micro_batch or 1)
        found["zero"].add(said.zero or 0)
        found["hsdp"].add(said.hsdp or 0)
        found["recompute"].add(said.recompute or "none")
        found["async_tp"].add(said.async_tp or "off")
        if said.sp:
            found["sp"].add(said.sp)
        if said.schedule:
            found["schedule"].add(said.schedule)
    found["sp"] = found["sp"] or {"on"}
    found["schedule"] = found["schedule"] or {"1f1b"}
    return {name: tuple(sorted(listed, key=lambda v: (str(type(v)), v))) for name, listed in found.items()}


def search_inside(rows: Sequence[PublishedRow]) -> list[tuple[Layout, float]] | None:
    """Return layout and predicted step time of what the search ranks in the space of runs; None: cannot.

    Args:
        rows: of a sweep: one model, machine and batch. Vocabularies are padded as for its first run.
    """
    with overlaid(fitted_to(_OTHER_HALF[rows[0].half])):
        jobs = _jobs(rows)
        if not jobs:
            return None
        job = jobs[0].job
        request = SearchRequest(
            model=job.model,  # type: ignore[arg-type]  # of a run: the source that a name would find
            cluster=job.cluster,
            gpus=job.gpus,
            seq_len=job.seq_len,
            global_batch=job.global_batch,
            dtype=job.dtype,
            stack=job.stack,
            settings=job.settings,
            values=values_of(jobs) | _HABITS,
            top=_TRIED,
            time_limit_s=_MOST_S,
        )
        try:
            summary = search_strategies(request).summary
        except InputError:
            return None
    found = []
    for entry in summary["ranking"]:
        stated = Strategy.parse(entry["strategy"]["shorthand"]).stated
        found.append((layout(stated, micro_batch=stated.micro_batch or 1), float(entry["step_time_s"])))
    return found


def _jobs(rows: Sequence[PublishedRow]) -> list[RowJob]:
    found = []
    for row in rows:
        try:
            found.append(job_of_row(row))
        except InputError:
            continue
    return found


def measured_of(
    rows: Sequence[PublishedRow], predicted: Mapping[str, RowPrediction]
) -> dict[Layout, Measured]:
    """Return what is known of the layouts of runs, repeats by their median."""
    listed: dict[Layout, list[RowPrediction]] = defaultdict(list)
    for row in rows:
        prediction = predicted[row.case_id]
        if prediction.predicted_s is not None and (prediction.measured_s is not None or row.oom):
            job = job_of_row(row).job
            listed[layout(job.strategy.stated, micro_batch=job.micro_batch or 1)].append(prediction)
    found = {}
    for name, runs in listed.items():
        times = [run.measured_s for run in runs if run.measured_s is not None]
        found[name] = Measured(
            step_time_s=median(times) if times else math.inf,
            predicted_s=runs[0].predicted_s or math.inf,
            fits=bool(runs[0].fits),
        )
    return found


def score_ranking(
    ranking: Sequence[tuple[Layout, float]], measured: Mapping[Layout, Measured]
) -> dict[str, Any]:
    """Return what a ranking is worth against what was run; see [Note: free search inside a sweep].

    Args:
        ranking: layout and predicted step time, best first; of layouts that are there twice the first counts.
        measured: what was run.
    """
    order = list(dict(reversed(ranking)))[::-1]
    predicted_s = dict(reversed(ranking))
    places = [name[:_NUM_SHOWN] for name in order]
    pick = order[0]
    ran = {name: run.step_time_s for name, run in measured.items() if run.step_time_s < math.inf}
    best = min(ran, key=lambda name: (ran[name], name))
    known = [name for name in order if name in ran]
    fitting = [run.predicted_s for run in measured.values() if run.fits]
    ended = "oom" if pick in measured else "not_measured"
    outcome = "measured" if pick in ran else ended
    top = [ran[name] for name in order[:TOP] if name in ran]
    return {
        "pick": outcome,
        "regret_1": ran[pick] / ran[best] - 1 if outcome == "measured" else None,
        "regret_first_measured": ran[known[0]] / ran[best] - 1 if known else None,
        "regret_5": min(top) / ran[best] - 1 if top else None,
        "oom_in_top_5": sum(name in measured and name not in ran for name in order[:TOP]),
        "measured_in_top_5": len(top),
        "ranked": len(order),
        "rank_of_best": places.index(best[:_NUM_SHOWN]) + 1 if best[:_NUM_SHOWN] in places else None,
        "promised": measured[best].predicted_s / predicted_s[pick] - 1,
        "missed": max(0.0, predicted_s[pick] / min(fitting) - 1) if fitting else None,
    }


def search_sweeps(
    sweeps: Sequence[tuple[str, Sequence[PublishedRow]]], predicted: Mapping[str, RowPrediction]
) -> dict[str, Any]:
    """Search inside every sweep; return scores and their summary.

    Args:
        sweeps: (name, its runs) pairs.
        predicted: the prediction of every run by name.
    """
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        rankings = list(pool.map(search_inside, [rows for _, rows in sweeps]))
    scored = []
    for (name, rows), ranking in zip(sweeps, rankings, strict=True):
        measured = measured_of(rows, predicted)
        if ranking and any(run.step_time_s < math.inf for run in measured.values()):
            scored.append({"sweep": name, **score_ranking(ranking, measured)})
    return {"n_sweeps": len(sweeps), "n_searched": len(scored), **_summary(scored), "sweeps": scored}


def _summary(scored: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def told(name: str) -> list[float]:
        return [each[name] for each in scored if each[name] is not None]

    counts = {
        kind: sum(each["pick"] == kind for each in scored) for kind in ("measured", "oom", "not_measured")
    }
    found: dict[str, Any] = {
        "picks": counts,
        "oom_in_top_5": sum(each["oom_in_top_5"] > 0 for each in scored),
    }
    for name in ("regret_1", "regret_first_measured", "regret_5", "promised", "missed"):
        listed = told(name)
        found[f"{name}_mean"], found[f"{name}_max"] = (fmean(listed), max(listed)) if listed else (None, None)
    ranks = told("rank_of_best")
    found["rank_of_best_median"] = median(ranks) if ranks else None
    found["best_not_ranked"] = len(scored) - len(ranks)
    return found

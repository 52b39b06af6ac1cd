"""One search over several numbers of GPUs: a search for each, and one answer made of them.

[Note: the fewest GPUs]
Numbers are tried rising: the divisors of a node, then 1, 2, 3, 4, 6, 8, 12, ... whole nodes. Between the
first that has an answer and the last that had none, whole nodes are tried by halving, as if more GPUs always
helped; `gpus` in the result lists every number that was tried, and how it ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from piper.errors import JobError
from piper.search.front import front_of
from piper.search.outcome import GAP_BASIS, PARETO_BASIS, SearchResult

if TYPE_CHECKING:
    from piper.search.search import SearchRequest

Search = Callable[["SearchRequest"], SearchResult]
MOST_NODES = 2048
"""Whole nodes that are tried at most where the request states no most."""
_WEAKEST = ("interrupted", "time_limit", "max_candidates", "estimate", "bound")
"""Ends of searches, the weakest answer first."""
_OF_THE_CHOSEN = ("why_not", "robustness", "target")
"""What the result says of the winner."""


def search_several(request: SearchRequest, search: Search, *, node: int, most_nodes: int) -> SearchResult:
    """Search at several numbers of GPUs.

    Args:
        request: with `gpu_counts`, or `min_gpus`.
        search: at one number.
        node: GPUs of a node.
        most_nodes: of the cluster.
    Raises: JobError if the work is not stated, or no number has a legal strategy.
    """
    if request.global_batch is None:
        raise JobError(
            where="command line", field="--global-batch", value="(nothing)",
            rule="must be stated where several numbers of GPUs are compared",
            fix="add for example --global-batch 512",
        )  # fmt: skip
    tried = _Tried(request=request, search=search)
    if request.min_gpus:
        _fewest(tried, request, node=node, most_nodes=most_nodes)
    else:
        for gpus in sorted(set(request.gpu_counts)):
            tried.at(gpus)
    if not tried.found:
        raise tried.refusals[min(tried.refusals)]
    return SearchResult(summary=_merged(tried), interrupted=tried.is_over)


def _fewest(tried: _Tried, request: SearchRequest, *, node: int, most_nodes: int) -> None:
    """Try numbers until the fewest with an answer is known; see [Note: the fewest GPUs]."""
    if request.gpu_counts:
        for gpus in sorted(set(request.gpu_counts)):
            if tried.at(gpus):
                return
        return
    most = request.gpus or min(most_nodes, MOST_NODES) * node
    below = 0
    for gpus in _rising(node, most):
        if tried.at(gpus):
            _between(tried, below, gpus, node=node)
            return
        below = gpus


def _between(tried: _Tried, below: int, gpus: int, *, node: int) -> None:
    low, high = below // node, gpus // node
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if tried.at(middle * node) else (middle, high)


def _rising(node: int, most: int) -> Iterator[int]:
    yield from (d for d in range(1, min(node, most + 1)) if node % d == 0)
    power = 1
    while power * node <= most:
        yield power * node
        if power > 1 and power * node * 3 // 2 <= most:
            yield power * node * 3 // 2
        power *= 2


@dataclass(kw_only=True)
class _Tried:
    """Searches so far, by number of GPUs."""

    request: SearchRequest
    search: Search
    found: dict[int, dict[str, Any]] = field(default_factory=dict)
    refusals: dict[int, JobError] = field(default_factory=dict)
    began_s: float = field(default_factory=time.perf_counter)
    is_over: bool = False

    def at(self, gpus: int) -> bool:
        """Search at a number of GPUs, unless time is over; return whether it has an answer."""
        if not self.is_over and not self._is_spent():
            try:
                result = self._searched(gpus)
            except JobError as problem:
                if problem.field != "space":
                    raise
                self.refusals[gpus] = problem
            else:
                self.found[gpus] = result.summary
                self.is_over = result.interrupted
        return answers(self.found.get(gpus), self.request)

    def _searched(self, gpus: int) -> SearchResult:
        asked = self._asked(gpus)
        try:
            return self.search(asked)
        except JobError as problem:  # of several searches those after an interrupt were never begun
            if problem.field != "--resume" or not self.found:
                raise
            return self.search(replace(asked, resume=False))

    def _asked(self, gpus: int) -> SearchRequest:
        limit, most = self.request.time_limit_s, self.request.max_candidates
        return replace(
            self.request,
            gpus=gpus,
            gpu_counts=(),
            min_gpus=False,
            time_limit_s=None if limit is None else max(1e-9, limit - self._spent_s()),
            max_candidates=None if most is None else most - self._simulated(),
        )

    def _spent_s(self) -> float:
        return time.perf_counter() - self.began_s

    def _simulated(self) -> int:
        return sum(int(summary["simulated"]) for summary in self.found.values())

    def _is_spent(self) -> bool:
        limit, most = self.request.time_limit_s, self.request.max_candidates
        late = limit is not None and bool(self.found) and self._spent_s() > limit
        return late or (most is not None and self._simulated() >= most)


def answers(summary: Mapping[str, Any] | None, request: SearchRequest) -> bool:
    """Return whether a search found what fits and, where one is asked for, is within the target."""
    best, target = (summary or {}).get("best"), request.target_step_time_s
    return best is not None and (target is None or best["step_time_s"] <= target)


def _merged(tried: _Tried) -> dict[str, Any]:
    """Return the object of the contract for the searches at all numbers of GPUs."""
    request, found = tried.request, tried.found
    chosen = _chosen(found, request)
    first = next(iter(found.values()))
    counts = {name: sum(s[name] for s in found.values()) for name in ("space_size", "evaluated", "simulated")}
    entries = [entry for summary in found.values() for entry in summary["ranking"]]
    return {
        **{name: first[name] for name in ("schema_version", "objective")},
        **counts,
        "pruned": {name: sum(s["pruned"][name] for s in found.values()) for name in first["pruned"]},
        "ended_by": min((s["ended_by"] for s in found.values()), key=_WEAKEST.index),
        **_bounds(found, chosen, request),
        "gap_basis": GAP_BASIS,
        "best": found[chosen]["best"] if chosen else None,
        "ranking": sorted(entries, key=lambda e: (_value(e, request), e["n_gpus"]))[: request.top],
        "pareto": front_of([entry for summary in found.values() for entry in summary["pareto"]]),
        "pareto_complete": all(s["pareto_complete"] for s in found.values()),
        "pareto_open": sum(s["pareto_open"] for s in found.values()),
        "pareto_basis": PARETO_BASIS,
        "heatmap": [tile for summary in found.values() for tile in summary["heatmap"]],
        "gpus": _tries(tried, chosen),
        "rejected": [
            row | {"family": f"gpus={gpus},{row['family']}"}
            for gpus, summary in found.items()
            for row in summary["rejected"]
        ],
        **{key: found[chosen][key] for key in _OF_THE_CHOSEN if chosen and key in found[chosen]},
        "timings_s": _timings(found, counts, wall_s=time.perf_counter() - tried.began_s),
    }


def _chosen(found: Mapping[int, Mapping[str, Any]], request: SearchRequest) -> int | None:
    """Return the number of GPUs of the answer; what meets the target goes before what does not."""
    usable = [gpus for gpus, summary in found.items() if summary["best"]]
    meeting = [gpus for gpus in usable if answers(found[gpus], request)]
    if request.min_gpus:
        return min(meeting, default=None)
    return min(meeting or usable, key=lambda g: (_value(found[g]["best"], request), g), default=None)


def _bounds(
    found: Mapping[int, Mapping[str, Any]], chosen: int | None, request: SearchRequest
) -> dict[str, float | int | None]:
    """Return lower bounds and the gap: over all numbers of GPUs, or at the fewest where these are the aim."""
    compared = [chosen] if request.min_gpus and chosen else list(found)
    key = "lower_bound_bytes" if request.objective == "memory" else "lower_bound_s"
    size = {gpus: gpus if request.objective == "cost" else 1 for gpus in compared}
    known = [found[gpus][key] * size[gpus] for gpus in compared if found[gpus][key] is not None]
    lower, best = min(known, default=None), found[chosen]["best"] if chosen else None
    value = _value(best, request) if best else None
    return {
        "lower_bound_s": lower if request.objective == "time" else None,
        "lower_bound_bytes": lower if request.objective == "memory" else None,
        "lower_bound_gpu_s": lower if request.objective == "cost" else None,
        "gap": None if lower is None or value is None else max(0.0, (value - lower) / value),
    }


def _value(entry: Mapping[str, Any], request: SearchRequest) -> float:
    """Return what is minimised: seconds, bytes, or GPU-seconds of a step."""
    if request.objective == "memory":
        return float(entry["peak_memory_bytes"])
    return float(entry["step_time_s"]) * (entry["n_gpus"] if request.objective == "cost" else 1)


def _tries(tried: _Tried, chosen: int | None) -> list[dict[str, Any]]:
    """Return how each number of GPUs ended: {gpus, outcome, strategy, step_time_s, ...}."""
    rows = []
    for gpus in sorted({*tried.found, *tried.refusals}):
        summary = tried.found.get(gpus)
        best = summary and summary["best"]
        row: dict[str, Any] = {
            "gpus": gpus,
            "outcome": _outcome(summary, tried.request, is_chosen=gpus == chosen),
            "strategy": best["strategy"]["shorthand"] if best else None,
            "step_time_s": best["step_time_s"] if best else None,
            "peak_memory_bytes": best["peak_memory_bytes"] if best else None,
            "lower_bound_s": summary["lower_bound_s"] if summary else None,
            "ended_by": summary["ended_by"] if summary else None,
        }
        if summary is not None and summary.get("conflict"):
            row["reason"] = summary["conflict"]["reason"]
        if gpus in tried.refusals:
            row["reason"] = f"{tried.refusals[gpus].value} {tried.refusals[gpus].rule}"
        rows.append(row)
    return rows


def _outcome(summary: Mapping[str, Any] | None, request: SearchRequest, *, is_chosen: bool) -> str:
    if summary is None:
        return "no legal strategy"
    if summary["best"] is None:
        return "nothing fits"
    if is_chosen:
        return "chosen"
    return "fits" if answers(summary, request) else "slower than the target"


def _timings(
    found: Mapping[int, Mapping[str, Any]], counts: Mapping[str, int], *, wall_s: float
) -> dict[str, float | None]:
    first = next(iter(found.values()))["timings_s"]["first_answer"]
    return {
        "wall": wall_s,
        "first_answer": first,
        "evaluations_per_s": counts["evaluated"] / wall_s,
        "simulations_per_s": counts["simulated"] / wall_s,
    }

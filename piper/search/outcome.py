"""What a search found: a record per candidate, and the result object of the contract made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from piper.search.candidate import Candidate
from piper.search.ends import ends_of, unsimulated_end
from piper.search.front import front_of, heat_map, open_points
from piper.search.frontier import Frontier
from piper.search.space import Space
from piper.search.status import Record, Status, layout_of
from piper.strategy import write_directives

GAP_BASIS = (
    "gap = (best - lower bound) / best of the objective, over the strategies of this space and relative to "
    "our simulator; it says nothing about the distance between simulator and cluster (see error_band)"
)
PARETO_BASIS = (
    "of the strategies that were simulated, over step time, peak memory and GPUs; by their bounds, "
    "pareto_open others might be on it; with none (pareto_complete) it is that of the whole space, by our "
    "simulator"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Everything a search knows at its end.

    Args:
        space: of the search.
        frontier: bounds and estimates.
        records: what was simulated.
        ended_by: why it ended.
        wall_s, first_answer_s: seconds.
    """

    space: Space
    frontier: Frontier
    records: Mapping[Candidate, Record]
    ended_by: str
    wall_s: float
    first_answer_s: float | None = None

    def ranked(self, objective: str) -> list[Record]:
        """Return what fits, best first."""
        fitting = (r for r in self.records.values() if r.status is Status.RANKED)
        return sorted(fitting, key=lambda r: (r.objective_value(objective), r.step_time_s, r.candidate))

    def diverse(self, objective: str) -> list[Record]:
        """Return the best of each layout that fits, best first."""
        found: dict[tuple[object, ...], Record] = {}
        for record in self.ranked(objective):
            found.setdefault(layout_of(record.candidate), record)
        return list(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The result of `piper search`.

    Args:
        summary: the object of the contract.
        interrupted: whether Ctrl-C ended it (what was found is kept).
    """

    summary: dict[str, Any]
    interrupted: bool = False

    @classmethod
    def of(
        cls,
        outcome: Outcome,
        *,
        objective: str,
        top: int,
        why_not: Mapping[str, str],
        interrupted: bool = False,
        target_step_time_s: float | None = None,
    ) -> SearchResult:
        """Rank, explain and count."""
        ranked = outcome.ranked(objective)
        ends = ends_of(outcome, objective)
        lower = lower_bound(outcome, ranked, objective)
        front = front_of([_entry(record) for record in ranked])
        might_be = open_points(outcome, front)
        summary: dict[str, Any] = {
            "schema_version": 1,
            "objective": objective,
            "space_size": outcome.space.size,
            "evaluated": len(outcome.frontier.points),
            "pruned": ends.counts,
            "simulated": len(outcome.records),
            "ended_by": outcome.ended_by,
            "lower_bound_s": lower if objective != "memory" else None,
            "lower_bound_bytes": int(lower) if objective == "memory" and lower is not None else None,
            "gap": _gap(lower, ranked, objective),
            "gap_basis": GAP_BASIS,
            "best": _entry(ranked[0]) if ranked else None,
            "ranking": [_entry(r) for r in outcome.diverse(objective)[:top]],
            "pareto": front,
            "pareto_complete": not might_be,
            "pareto_open": might_be,
            "pareto_basis": PARETO_BASIS,
            "heatmap": heat_map(outcome),
            "rejected": ends.rows,
        }
        if target_step_time_s is not None:
            summary["target"] = _target(target_step_time_s, summary)
        if why_not:
            summary["why_not"] = _why_not(outcome, why_not, ranked)
        summary["timings_s"] = {
            "wall": outcome.wall_s,
            "first_answer": outcome.first_answer_s,
            "evaluations_per_s": len(outcome.frontier.points) / outcome.wall_s,
            "simulations_per_s": len(outcome.records) / outcome.wall_s,
        }
        return cls(summary=summary, interrupted=interrupted)

    def to_json(self) -> dict[str, Any]:
        """Return the object of the contract."""
        return self.summary

    def save(self, folder: str | Path) -> SearchResult:
        """Write `ranking.json` and a strategy file per entry; return the result with `strategy_file` set."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for stale in target.glob("strategy-*.json"):
            if stale.stem.removeprefix("strategy-").isdigit():
                stale.unlink()
        files: dict[str, str] = {}
        entries = [*self.summary["ranking"], *self.summary["pareto"]]
        for entry in entries:
            name = entry["strategy"]["shorthand"]
            if name not in files:
                path = target / f"strategy-{len(files) + 1}.json"
                path.write_text(write_directives(entry["strategy"]["directives"]), encoding="utf-8")
                files[name] = str(path)

        def named(entry: dict[str, Any] | None) -> dict[str, Any] | None:
            return entry and entry | {"strategy_file": files.get(entry["strategy"]["shorthand"])}

        summary = self.summary | {
            "best": named(self.summary["best"]),
            "ranking": [named(entry) for entry in self.summary["ranking"]],
            "pareto": [named(entry) for entry in self.summary["pareto"]],
        }
        (target / "ranking.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        return replace(self, summary=summary)


def _target(target_s: float, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return whether the winner is within a step time, and whether anything may be."""
    best, lower_s = summary["best"], summary["lower_bound_s"]
    met = best is not None and best["step_time_s"] <= target_s
    return {"step_time_s": target_s, "met": met, "impossible": lower_s is None or lower_s > target_s}


def _entry(record: Record) -> dict[str, Any]:
    return {**(record.result or {}), "strategy_file": None}


def lower_bound(outcome: Outcome, ranked: Sequence[Record], objective: str) -> float | None:
    """Return what no strategy of the space that may fit can beat (seconds, bytes); None: there is none."""
    frontier = outcome.frontier
    open_points = (p.bound for p in frontier.points if p.candidate not in outcome.records)
    known = (r.objective_value(objective) for r in ranked[:1])
    lowest = min([frontier.lowest_bound, *open_points, *known], default=float("inf"))
    return lowest if lowest < float("inf") else None


def _gap(lower: float | None, ranked: Sequence[Record], objective: str) -> float | None:
    """Return by which share the winner could still be beaten in the objective."""
    if lower is None or not ranked:
        return None
    best = ranked[0].objective_value(objective)
    return max(0.0, (best - lower) / best)


def _why_not(outcome: Outcome, wanted: Mapping[str, str], ranked: list[Record]) -> dict[str, Any]:
    """Return how the best candidate with the wanted values ended, against the winner."""

    def asked(candidate: Candidate) -> bool:
        return all(str(getattr(candidate, name)) == value for name, value in wanted.items())

    answer: dict[str, Any] = {"asked": dict(wanted)}
    matching = [record for candidate, record in sorted(outcome.records.items()) if asked(candidate)]
    if matching:
        best = min(matching, key=lambda r: (r.status is not Status.RANKED, r.step_time_s, r.candidate))
        answer |= {
            "strategy": str(best.candidate.shorthand), "status": str(best.status), "reason": best.reason,
        }  # fmt: skip
        if best.result and best.status is Status.RANKED and ranked and ranked[0].result:
            mine, winner = best.result["breakdown_s"], ranked[0].result["breakdown_s"]
            answer["slower_by_s"] = best.step_time_s - ranked[0].step_time_s
            answer["by_cause_s"] = {part: mine[part] - winner[part] for part in mine}
        return answer
    answer |= unsimulated_end(outcome, wanted)
    if ranked and answer.get("bound_s") is not None:
        answer["winner_s"] = ranked[0].step_time_s
    return answer

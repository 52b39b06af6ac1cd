"""What a search found: a record per candidate, and the result object of the contract made of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from piper.search.evaluate import Bounds
from piper.search.space import Candidate, Space
from piper.strategy import write_directives

GAP_BASIS = (
    "gap = (best - lower bound) / best of the objective, over the strategies of this space and relative to "
    "our simulator; it says nothing about the distance between simulator and cluster (see error_band)"
)
PARETO_BASIS = "of the strategies that were simulated: others cannot win, but may need less memory or time"


class Status(StrEnum):
    """How a candidate ended."""

    RANKED = "ranked"
    MEMORY_BOUND = "does not fit (bound)"
    OUT_OF_MEMORY = "does not fit (simulated)"
    BOUND = "bounded out"
    NOT_REACHED = "not reached"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One candidate's end.

    Args:
        candidate: which.
        status: how it ended.
        reason: why it is not ranked.
        bound_s: lower bound of its step time where it was not simulated.
        result: the shortened simulation.
    """

    candidate: Candidate
    status: Status
    reason: str = ""
    bound_s: float | None = None
    result: dict[str, Any] | None = None

    @property
    def step_time_s(self) -> float:
        """Return the simulated step time, or infinity."""
        return float(self.result["step_time_s"]) if self.result else float("inf")

    def objective_value(self, objective: str) -> float:
        """Return what is minimised."""
        if self.result is None:
            return float("inf")
        return float(self.result["peak_memory_bytes"]) if objective == "memory" else self.step_time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Everything a search knows at its end."""

    space: Space
    bounds: Mapping[Candidate, Bounds]
    records: Mapping[Candidate, Record]
    ended_by: str
    wall_s: float


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
    ) -> SearchResult:
        """Rank, explain and count."""
        records = list(outcome.records.values())
        ranked = sorted(
            (r for r in records if r.status is Status.RANKED),
            key=lambda r: (r.objective_value(objective), r.step_time_s, r.candidate),
        )
        simulated = [r for r in records if r.result is not None]
        best_s = min((r.step_time_s for r in ranked), default=None)
        least = _lower_bound(outcome, ranked, "memory")
        summary: dict[str, Any] = {
            "schema_version": 1,
            "objective": objective,
            "space_size": outcome.space.size,
            "evaluated": len(outcome.bounds),
            "pruned": _pruned(outcome),
            "simulated": len(simulated),
            "ended_by": outcome.ended_by,
            "lower_bound_s": _lower_bound(outcome, ranked, "time"),
            "lower_bound_bytes": None if least is None else int(least),
            "gap": _gap(outcome, ranked, objective),
            "gap_basis": GAP_BASIS,
            "best": _entry(ranked[0]) if ranked else None,
            "ranking": [_entry(r) for r in ranked[:top]],
            "pareto": [_entry(r) for r in _pareto(ranked)],
            "pareto_basis": PARETO_BASIS,
            "rejected": _rejected(outcome, best_s),
        }
        if why_not:
            summary["why_not"] = _why_not(outcome, why_not, ranked)
        summary["timings_s"] = {
            "wall": outcome.wall_s,
            "evaluations_per_s": len(outcome.bounds) / outcome.wall_s if outcome.wall_s > 0 else 0.0,
            "simulations_per_s": len(simulated) / outcome.wall_s if outcome.wall_s > 0 else 0.0,
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


def _entry(record: Record) -> dict[str, Any]:
    return {**(record.result or {}), "strategy_file": None}


def _lower_bound(outcome: Outcome, ranked: list[Record], objective: str) -> float | None:
    """Return what no strategy of the space that may fit can beat (seconds, bytes), or None if not known."""
    if len(outcome.bounds) < len(outcome.space.candidates):
        return None
    unknown = [
        outcome.bounds[c].value_of(objective)
        for c, r in outcome.records.items()
        if r.status in {Status.BOUND, Status.NOT_REACHED}
    ]
    return min([*unknown, *(r.objective_value(objective) for r in ranked)], default=None)


def _gap(outcome: Outcome, ranked: list[Record], objective: str) -> float | None:
    """Return by which share the winner could still be beaten in the objective."""
    lower = _lower_bound(outcome, ranked, objective)
    if lower is None or not ranked:
        return None
    best = ranked[0].objective_value(objective)
    return max(0.0, (best - lower) / best)


def _pruned(outcome: Outcome) -> dict[str, int]:
    """Return counts that add up, with `simulated`, to the space."""
    statuses = [record.status for record in outcome.records.values()]
    return {
        "illegal": sum(outcome.space.illegal.values()),
        "duplicate": outcome.space.duplicates,
        "memory": statuses.count(Status.MEMORY_BOUND),
        "bound": statuses.count(Status.BOUND),
        "not_reached": statuses.count(Status.NOT_REACHED),
    }


def _pareto(ranked: list[Record]) -> list[Record]:
    """Return what no other simulated strategy beats in both step time and peak memory, fastest first."""
    front: list[Record] = []
    least = float("inf")
    for record in sorted(ranked, key=lambda r: (r.step_time_s, r.objective_value("memory"), r.candidate)):
        memory = record.objective_value("memory")
        if memory < least:
            front.append(record)
            least = memory
    return front


def _rejected(outcome: Outcome, best_s: float | None) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str], list[float | None]] = {}
    for (family, reason), count in sorted(outcome.space.illegal.items()):
        rows[family, f"illegal: {reason}"] = [None] * count
    for candidate in sorted(outcome.records):
        record = outcome.records[candidate]
        if record.status is Status.RANKED and record.step_time_s == best_s:
            continue
        known = record.step_time_s if record.result else record.bound_s
        reason = "slower" if record.status is Status.RANKED else str(record.status)
        rows.setdefault((candidate.family, reason), []).append(known)
    return [
        {
            "family": family,
            "reason": reason,
            "count": len(values),
            "best_s": min((v for v in values if v is not None), default=None),
        }
        for (family, reason), values in sorted(rows.items(), key=lambda row: _numbers_in(row[0][0]))
    ]


def _numbers_in(family: str) -> list[int]:
    """Return the numbers of a family, so that `pp=8` comes before `pp=16`."""
    return [int(number) for number in re.findall(r"\d+", family)]


def _why_not(outcome: Outcome, wanted: Mapping[str, str], ranked: list[Record]) -> dict[str, Any]:
    """Return how the best candidate with the wanted values ended, against the winner."""
    matching = [
        record
        for candidate, record in sorted(outcome.records.items())
        if all(str(getattr(candidate, name)) == value for name, value in wanted.items())
    ]
    answer: dict[str, Any] = {"asked": dict(wanted), "candidates": len(matching)}
    if not matching:
        reasons = sorted({reason for _, reason in outcome.space.illegal})
        return answer | {
            "status": "illegal",
            "reason": "no legal strategy has these values: " + "; ".join(reasons),
        }
    best = min(matching, key=lambda r: (r.step_time_s, r.bound_s or float("inf"), r.candidate))
    answer |= {"strategy": str(best.candidate.shorthand), "status": str(best.status), "reason": best.reason}
    if best.result and ranked and ranked[0].result:
        mine, winner = best.result["breakdown_s"], ranked[0].result["breakdown_s"]
        answer["slower_by_s"] = best.step_time_s - ranked[0].step_time_s
        answer["by_cause_s"] = {part: mine[part] - winner[part] for part in mine}
    elif best.bound_s is not None and ranked:
        answer["bound_s"] = best.bound_s
        answer["winner_s"] = ranked[0].step_time_s
    return answer

"""How every point of a space ended, counted without making the points: counts that add up to the space."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from piper.search.candidate import Candidate, family_of, has_values
from piper.search.choices import FRACTION
from piper.search.matching import cells_with
from piper.search.status import Status

if TYPE_CHECKING:
    from piper.search.outcome import Outcome

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Counts of points by how they ended.

    Args:
        counts: illegal, duplicate, memory, bound, fast, not_reached: with what was simulated, the space.
        rows: {family, reason, count, best_s} of all that is not the winner.
    """

    counts: dict[str, int]
    rows: list[dict[str, Any]]


def ends_of(outcome: Outcome, objective: str) -> Ends:
    """Count the ends of all points of a search."""
    table, space = outcome.frontier.table, outcome.space
    points = np.array([len(t) for t in space.keepings], dtype=np.int64)[space.keeping_of[table.layout]]
    ranked = outcome.ranked(objective)
    best = ranked[0].objective_value(objective) if ranked else float("inf")
    fast, bounded = _of_points(outcome, best)
    low = outcome.frontier.low
    seen = np.zeros(len(table), dtype=np.bool_)
    seen[list(outcome.frontier.expanded)] = True
    waiting = ~seen & np.isfinite(low)
    out = waiting & (low >= best)
    judged = waiting & ~out & (outcome.frontier.likely >= best)
    dead = np.where(np.isfinite(low), np.minimum(table.too_big, points), points)
    for cell in outcome.frontier.expanded:
        dead[cell] = points[cell] - bounded["all"].get(cell, 0)
    alive = points - dead
    counts = {
        "illegal": sum(space.illegal.values()),
        "duplicate": space.duplicates,
        "memory": int(dead.sum()),
        "bound": int(alive[out].sum()) + sum(bounded["out"].values()),
        "fast": sum(fast.values()) + int(alive[judged].sum()),
        "not_reached": int(alive[waiting & ~out & ~judged].sum()),
    }
    rows: dict[tuple[str, str], list[float | None]] = {}
    for (family, reason), count in space.illegal.items():
        _add(rows, (family, f"illegal: {reason}"), count, best_s=None)
    families = _families(outcome)
    bound_s = table.bound_ns / 1e9
    for status, which, number in (
        (Status.MEMORY_BOUND, dead > 0, dead),
        (Status.BOUND, out, alive),
        (Status.ESTIMATED, judged, alive),
        (Status.NOT_REACHED, waiting & ~out & ~judged, alive),
    ):
        for family in np.unique(families[which]).tolist():
            mine = which & (families == family)
            least = float(bound_s[mine].min()) if status is not Status.MEMORY_BOUND else float("inf")
            _add(
                rows,
                (family, str(status)),
                int(number[mine].sum()),
                best_s=least if np.isfinite(least) else None,
            )
    for status, found in ((Status.BOUND, bounded["out"]), (Status.ESTIMATED, fast)):
        for cell, count in found.items():
            _add(rows, (str(families[cell]), str(status)), count, best_s=float(bound_s[cell]))
    for record in outcome.records.values():
        if ranked and record is ranked[0]:
            continue
        reason = "slower" if record.status is Status.RANKED else str(record.status)
        _add(rows, (record.candidate.family, reason), 1, best_s=record.step_time_s)
    return Ends(counts=counts, rows=_sorted(rows))


def unsimulated_end(outcome: Outcome, wanted: Mapping[str, str]) -> dict[str, Any]:
    """Return how points with some values ended, none of which was simulated."""
    points = [p for p in outcome.frontier.points if has_values(p.candidate, wanted)]
    if points:
        best = min(points)
        status = Status.ESTIMATED if not best.unlikely else Status.MEMORY_BOUND
        return {
            "strategy": str(best.candidate.shorthand),
            "status": str(status),
            "reason": f"estimated at {best.estimate:.6g}",
            "bound_s": best.bound_s,
        }
    table, space = outcome.frontier.table, outcome.space
    cells = cells_with(table, wanted)
    if not len(cells):
        reasons = sorted({reason for _, reason in space.illegal})
        text = "no legal strategy has these values: " + "; ".join(reasons)
        return {"status": "illegal", "reason": text}
    bound = table.bound_ns[cells]
    best_cell = int(cells[int(np.argmin(bound))])
    found = {"strategy": str(candidate_with(outcome, best_cell, wanted).shorthand)}
    if not np.isfinite(bound.min()) or best_cell in outcome.frontier.expanded:
        return found | {"status": str(Status.MEMORY_BOUND), "reason": _too_big(outcome, best_cell, wanted)}
    return found | {
        "status": str(Status.BOUND),
        "reason": str(Status.BOUND),
        "bound_s": float(bound.min()) / 1e9,
    }


def candidate_with(outcome: Outcome, cell: int, wanted: Mapping[str, str]) -> Candidate:
    """Return the first point of a cell with some values, or the first one."""
    table, space = outcome.frontier.table, outcome.space
    layout, working = int(table.layout[cell]), int(table.working[cell])
    rows = range(len(space.keepings[int(space.keeping_of[layout])]))
    points = [space.candidate(layout, working, row) for row in rows]
    return next((point for point in points if has_values(point, wanted)), points[0])


def _too_big(outcome: Outcome, cell: int, wanted: Mapping[str, str]) -> str:
    table, space = outcome.frontier.table, outcome.space
    layout, working = int(table.layout[cell]), int(table.working[cell])
    table.refine(np.array([cell]))
    least = outcome.frontier.estimator.of(cell).least_bytes
    rows = [r for r in range(len(least)) if has_values(space.candidate(layout, working, r), wanted)]
    needed = float(least[rows].min()) if rows else table.needed_at_least(cell)[0]
    over, rank = (needed - table.capacity_bytes) / 2**30, table.needed_at_least(cell)[1]
    where = f"on pipeline rank {rank}, {over:.1f} GiB more than a device has"
    return f"needs at least {needed / 2**30:.1f} GiB {where}"


def _of_points(outcome: Outcome, best: float) -> tuple[dict[int, int], dict[str, dict[int, int]]]:
    """Return, by cell, points that were estimated only, and (all that may fit, those above the best)."""
    fast: dict[int, int] = {}
    every: dict[int, int] = {}
    out: dict[int, int] = {}
    for point in outcome.frontier.points:
        every[point.cell] = every.get(point.cell, 0) + 1
        if point.candidate in outcome.records:
            continue
        target = out if point.bound >= best else fast
        target[point.cell] = target.get(point.cell, 0) + 1
    return fast, {"all": every, "out": out}


def _families(outcome: Outcome) -> npt.NDArray[np.str_]:
    table, space = outcome.frontier.table, outcome.space
    again = table.ways(np.arange(len(table)))[2]
    columns = [space.layouts[name][table.layout] for name in ("pp", "tp", "cp", "ep")]
    keys = np.stack([*columns, again], axis=1)
    distinct, number = np.unique(keys, axis=0, return_inverse=True)
    texts = space.choices.texts("recompute")
    names = [
        family_of(pp=pp, tp=tp, cp=cp, ep=ep, recompute=texts[mode].replace(FRACTION, " %"))
        for pp, tp, cp, ep, mode in distinct.tolist()
    ]
    return np.array(names or [""], dtype=np.str_)[number.reshape(-1)]


def _add(
    rows: dict[tuple[str, str], list[float | None]],
    key: tuple[str, str],
    count: int,
    *,
    best_s: float | None,
) -> None:
    if not count:
        return
    known = rows.setdefault(key, [0.0, None])
    known[0] = (known[0] or 0.0) + count
    known[1] = best_s if known[1] is None else known[1] if best_s is None else min(known[1], best_s)


def _sorted(rows: Mapping[tuple[str, str], list[float | None]]) -> list[dict[str, Any]]:
    return [
        {"family": family, "reason": reason, "count": int(values[0] or 0), "best_s": values[1]}
        for (family, reason), values in sorted(rows.items(), key=lambda row: (_numbers_in(row[0][0]), row[0]))
    ]


def _numbers_in(family: str) -> list[int]:
    """Return the numbers of a family, so that `pp=8` comes before `pp=16`."""
    return [int(number) for number in re.findall(r"\d+", family)]

"""What no other strategy beats in every respect, and the best of every pair of degrees.

[Note: how complete a front is]
A front is of what was simulated. Of the other points the bounds say which could be on it: those that no
strategy of the front is at least as fast as, with at most as much memory, as their bounds. Their number is
given; 0 means that the front is that of the whole space, relative to our simulator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from piper.search.status import Record, Status

if TYPE_CHECKING:
    from piper.search.outcome import Outcome

Floats = npt.NDArray[np.float64]
_KEYS = ("step_time_s", "peak_memory_bytes", "n_gpus")
"""What a front is over; less is better."""


def front_of(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the results that no other one beats, or equals, in step time, peak memory and GPUs.

    Args:
        entries: results; of equal ones the first stays.
    Returns: them, fastest first.
    """
    found: list[Mapping[str, Any]] = []
    for entry in sorted(entries, key=lambda e: [e[key] for key in _KEYS]):
        if not any(all(other[key] <= entry[key] for key in _KEYS) for other in found):
            found.append(entry)
    return found


def open_points(outcome: Outcome, front: Sequence[Mapping[str, Any]]) -> int:
    """Return how many points that were not simulated might be on the front; see [Note: how complete...]."""
    table, frontier = outcome.frontier.table, outcome.frontier
    space = outcome.space
    points_of = np.array([len(t) for t in space.keepings], dtype=np.int64)[space.keeping_of[table.layout]]
    alive = points_of - np.minimum(table.too_big, points_of)
    alive[~np.isfinite(table.bound_ns)] = 0
    alive[list(frontier.expanded)] = 0
    count = int(alive[~_beaten(table.bound_ns / 1e9, table.least_bytes, front)].sum())
    points = [p for p in frontier.points if p.candidate not in outcome.records]
    times = np.array([p.bound_s for p in points], dtype=np.float64)
    least = table.least_bytes[np.array([p.cell for p in points], dtype=np.int64)]
    return count + int((~_beaten(times, least, front)).sum())


def _beaten(
    time_s: Floats, memory_bytes: Floats, front: Sequence[Mapping[str, Any]]
) -> npt.NDArray[np.bool_]:
    """Return which bounds are no better than one strategy of a front of one number of GPUs, [n]."""
    times = np.array([entry["step_time_s"] for entry in front], dtype=np.float64)
    memory = np.array([np.inf, *(entry["peak_memory_bytes"] for entry in front)], dtype=np.float64)
    return np.asarray(memory[np.searchsorted(times, time_s, side="right")] <= memory_bytes)


def heat_map(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the best of each tp and pp: {gpus, tp, pp, step_time_s, basis, strategy}.

    basis: "simulated", the best that was; else "estimated", or "bound", which no strategy of the pair is
    faster than; or "does not fit".
    """
    table = outcome.frontier.table
    layouts = outcome.space.layouts
    pairs = np.stack([layouts[name][table.layout] for name in ("gpus", "tp", "pp")], axis=1)
    distinct, number = np.unique(pairs, axis=0, return_inverse=True)
    bounds = np.full(len(distinct), np.inf)
    np.minimum.at(bounds, number.reshape(-1), table.bound_ns / 1e9)
    found = {
        tuple(pair): _tile(pair, float(bound)) for pair, bound in zip(distinct.tolist(), bounds, strict=True)
    }
    for point in outcome.frontier.points:
        tile = found[_pair(point.candidate)]
        if not point.unlikely and outcome.frontier.objective != "memory":
            _better(tile, point.estimate, "estimated", str(point.candidate.shorthand))
    refused = {_pair(r.candidate) for r in outcome.records.values() if r.status is not Status.RANKED}
    for record in sorted(outcome.ranked("time"), key=_record_key):
        _better(
            found[_pair(record.candidate)], record.step_time_s, "simulated", str(record.candidate.shorthand)
        )
    for pair in refused:
        if found[pair]["basis"] == "bound":
            found[pair] |= {"basis": "does not fit", "step_time_s": None}
    return list(found.values())


_ORDER = ("bound", "estimated", "simulated")


def _better(tile: dict[str, Any], seconds: float, basis: str, strategy: str) -> None:  # noqa: PLR0917
    """Take a time that is known better, or is less and known as well."""
    rank, now = _ORDER.index(basis), _ORDER.index(tile["basis"]) if tile["basis"] in _ORDER else -1
    if rank > now or (rank == now and seconds < tile["step_time_s"]):
        tile |= {"step_time_s": seconds, "basis": basis, "strategy": strategy}


def _tile(pair: Sequence[int], bound_s: float) -> dict[str, Any]:
    gpus, tp, pp = pair
    fits = bool(np.isfinite(bound_s))
    return {
        "gpus": gpus, "tp": tp, "pp": pp, "step_time_s": bound_s if fits else None,
        "basis": "bound" if fits else "does not fit", "strategy": None,
    }  # fmt: skip


def _pair(candidate: Any) -> tuple[int, int, int]:
    return candidate.gpus, candidate.tp, candidate.pp


def _record_key(record: Record) -> tuple[float, Any]:
    return record.step_time_s, record.candidate

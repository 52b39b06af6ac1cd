"""A timeline as the compact object that the report's script draws; times are in units of 100 ns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.plan.buffers import MemoryClass
from simulator.plan.task import TaskKind
from simulator.timeline.timeline import RankTrack, Timeline

TICK_NS = 100
MOST_SPANS = 60_000
MOST_MEMORY_POINTS = 1_200

Int64Array = npt.NDArray[np.int64]


def timeline_data(timeline: Timeline, *, step_time_s: float) -> dict[str, Any]:
    """Describe a timeline; one that is too long for a page keeps its last step, then fewer ranks.

    Args:
        timeline: simulated or measured.
        step_time_s: length of the window that is shown at first: the last step.
    """
    end = timeline.makespan_ns
    window = max(0, end - round(step_time_s * 1e9))
    total = sum(len(track.task) for track in timeline.tracks)
    begin = 0 if total <= MOST_SPANS else window
    kept = _few_enough(timeline.tracks, begin)
    return {
        "source": timeline.source,
        "tick_ns": TICK_NS,
        "begin": begin // TICK_NS,
        "end": -(-end // TICK_NS),
        "window": window // TICK_NS,
        "step_ends": [int(ns) // TICK_NS for ns in timeline.step_end_ns],
        "kinds": [kind.name for kind in TaskKind],
        "classes": [entry.name.lower() for entry in MemoryClass],
        "ranks": [_rank_data(track, begin) for track in kept],
        "left_out": len(timeline.tracks) - len(kept),
    }


def _few_enough(tracks: Sequence[RankTrack], begin: int) -> list[RankTrack]:
    """Return the tracks, or evenly spread ones (first and last among them) whose spans fit on a page."""
    counts = [int((track.end_ns > begin).sum()) for track in tracks]
    keep = len(tracks)
    while keep > 1 and sum(counts[i] for i in _spread(len(tracks), keep)) > MOST_SPANS:
        keep = keep * 3 // 4
    return [tracks[i] for i in _spread(len(tracks), keep)]


def _spread(count: int, keep: int) -> list[int]:
    if keep >= count:
        return list(range(count))
    return sorted({round(i * (count - 1) / max(keep - 1, 1)) for i in range(keep)})


def _rank_data(track: RankTrack, begin: int) -> dict[str, Any]:
    order = np.flatnonzero(track.end_ns > begin)
    order = order[np.lexsort((track.start_ns[order], track.stream[order]))]
    start = track.start_ns[order] // TICK_NS
    length = np.maximum(-(-track.end_ns[order] // TICK_NS) - start, 0)
    return {
        "rank": track.rank,
        "pipeline_rank": track.pipeline_rank,
        "n_devices": track.n_devices,
        "stages": list(track.stages),
        "streams": list(track.streams),
        "codes": list(track.codes),
        "kind_of": track.kinds.tolist(),
        "task": track.task[order].tolist(),
        "step": track.step[order].tolist(),
        "stream": track.stream[order].tolist(),
        "start": start.tolist(),
        "length": length.tolist(),
        "memory": _memory_data(track),
    }


def _memory_data(track: RankTrack) -> dict[str, Any]:
    """Keep at most `MOST_MEMORY_POINTS` changes: of each run of changes the one with the most memory."""
    if not len(track.memory_ns):
        return {"at": [], "bytes": [], "thinned": False}
    kept = _peaks(track.memory_bytes.sum(axis=1), MOST_MEMORY_POINTS)
    return {
        "at": (track.memory_ns[kept] // TICK_NS).tolist(),
        "bytes": track.memory_bytes[kept].tolist(),
        "thinned": len(kept) < len(track.memory_ns),
    }


def _peaks(totals: Int64Array, most: int) -> Int64Array:
    """Return rising positions: the first, the last and the highest of each of `most` runs of equal length."""
    if len(totals) <= most:
        return np.arange(len(totals), dtype=np.int64)
    edges = np.linspace(0, len(totals), most - 1).astype(np.int64)
    highest = [int(a + np.argmax(totals[a:b])) for a, b in pairwise(edges)]
    return np.unique(np.array([0, *highest, len(totals) - 1], dtype=np.int64))

"""`Timeline`: what happened, and when, on every rank. Simulated and measured runs give the same type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankTrack:
    """The spans and the memory of one device plan (simulated: of all its replicas) or of one rank (measured).

    Span columns have one entry per executed task, in dispatch order, step after step.

    Args:
        rank: lowest global rank shown here.
        n_devices: how many ranks behave like this one.
        pipeline_rank: its device plan.
        stages: stages it hosts.
        streams: stream names.
        task: int64 [spans], position in the dispatch list of the device plan.
        step: int64 [spans].
        stream: int64 [spans].
        dispatch_ns: int64 [spans], host launch complete.
        ready_ns: int64 [spans], head of its stream with all waits done; communication: joined.
        start_ns: int64 [spans], running (compute) or on the wire (communication).
        end_ns: int64 [spans].
        memory_ns: int64 [changes], times at which memory changes, rising.
        memory_bytes: int64 [changes, classes], bytes by `MemoryClass` from that time on.
    """

    rank: int
    n_devices: int
    pipeline_rank: int
    stages: tuple[int, ...]
    streams: tuple[str, ...]
    task: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]
    stream: npt.NDArray[np.int64]
    dispatch_ns: npt.NDArray[np.int64]
    ready_ns: npt.NDArray[np.int64]
    start_ns: npt.NDArray[np.int64]
    end_ns: npt.NDArray[np.int64]
    memory_ns: npt.NDArray[np.int64]
    memory_bytes: npt.NDArray[np.int64]
    codes: Sequence[str]
    """Task code by dispatch position."""
    kinds: npt.NDArray[np.int64]
    """`TaskKind` by dispatch position."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """All tracks of a run on one clock that starts at 0.

    Args:
        source: "simulated" or "measured".
        tracks: by pipeline rank (simulated) or by rank (measured).
        step_end_ns: int64 [steps], when the last rank finished each step.
        warnings: what a reader of its numbers should know.
    """

    source: str
    tracks: tuple[RankTrack, ...]
    step_end_ns: npt.NDArray[np.int64]
    warnings: tuple[str, ...] = ()

    @property
    def num_steps(self) -> int:
        """Return how many steps the timeline covers."""
        return len(self.step_end_ns)

    @property
    def makespan_ns(self) -> int:
        """Return the end of the last step."""
        return int(self.step_end_ns[-1])

    @property
    def step_time_ns(self) -> int:
        """Return the last period between step ends; of a single step, its makespan."""
        previous = int(self.step_end_ns[-2]) if self.num_steps > 1 else 0
        return self.makespan_ns - previous

    @property
    def window_ns(self) -> tuple[int, int]:
        """Return (begin, end) of the last `step_time_ns` up to the end of the last step."""
        return self.makespan_ns - self.step_time_ns, self.makespan_ns

    def rows(self) -> list[tuple[int, str, str, int, int]]:
        """Return (rank, stream, code, start_ns, end_ns) of every span, by start, rank, stream."""
        found = [
            (track.rank, track.streams[stream], track.codes[task], start, end)
            for track in self.tracks
            for task, stream, start, end in zip(
                track.task.tolist(),
                track.stream.tolist(),
                track.start_ns.tolist(),
                track.end_ns.tolist(),
                strict=True,
            )
        ]
        return sorted(found, key=lambda row: (row[3], row[0], row[1], row[4]))

    def to_frame(self) -> pd.DataFrame:
        """Return one row per span: rank, stream, step, code, kind, dispatch, ready, start and end in ns."""
        from simulator.timeline.frame import timeline_frame

        return timeline_frame(self)

    def plot(self, path: str | Path) -> Path:
        """Draw the last step as a picture (PNG or SVG by suffix) and return its path."""
        from simulator.timeline.plots import plot_timeline

        return plot_timeline(self, path)

"""What a timeline from a file must fulfil before anything draws or sums it: one word on the first fault."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from simulator import rules
from simulator.plan.buffers import MemoryClass
from simulator.plan.task import TaskKind
from simulator.timeline.timeline import RankTrack, Timeline

SPAN_COLUMNS = ("task", "step", "stream", "dispatch_ns", "ready_ns", "start_ns", "end_ns")


def timeline_fault(timeline: Timeline) -> str | None:
    """Return what is wrong with a timeline, such as "track 0: end_ns lies before start_ns"; None: nothing."""
    return next(_faults(timeline), None)


def _faults(timeline: Timeline) -> Iterator[str]:
    if not isinstance(timeline.source, str):
        yield "source is no text"
    if not all(isinstance(text, str) for text in timeline.warnings):
        yield "warnings are no texts"
    if not timeline.tracks:
        yield "there are no tracks"
    ends = timeline.step_end_ns
    if not _is_column(ends) or not len(ends) or (np.diff(ends, prepend=0) < 0).any():
        yield "step_end_ns is no rising column of whole ns"
        return
    for number, track in enumerate(timeline.tracks):
        for fault in _track_faults(track, num_steps=len(ends)):
            yield f"track {number}: {fault}"


def _track_faults(track: RankTrack, *, num_steps: int) -> Iterator[str]:
    numbers = (track.rank, track.n_devices, track.pipeline_rank, *track.stages)
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
        yield "rank, n_devices, pipeline_rank and stages must be whole numbers"
    if not all(isinstance(text, str) for text in (*track.streams, *track.codes)):
        yield "streams and codes must be texts"
    columns = {name: getattr(track, name) for name in (*SPAN_COLUMNS, "memory_ns", "kinds")}
    wrong = [name for name, column in columns.items() if not _is_column(column)]
    if wrong:
        yield f"{wrong[0]} is no column of whole numbers from 0 to 2^62"
        return
    yield from _span_faults(track, num_steps=num_steps)
    yield from _memory_faults(track)


def _span_faults(track: RankTrack, *, num_steps: int) -> Iterator[str]:
    lengths = {len(getattr(track, name)) for name in SPAN_COLUMNS}
    if len(lengths) > 1:
        yield f"columns of spans differ in length: {sorted(lengths)}"
        return
    if len(track.kinds) != len(track.codes):
        yield f"there are {len(track.kinds)} kinds for {len(track.codes)} codes"
    limits = {
        "task": len(track.codes),
        "stream": len(track.streams),
        "step": num_steps,
        "kinds": len(TaskKind),
    }
    for name, limit in limits.items():
        if (getattr(track, name) >= limit).any():
            yield f"{name} has an index of {limit} or more"
    if (track.end_ns < track.start_ns).any():
        yield "end_ns lies before start_ns"


def _memory_faults(track: RankTrack) -> Iterator[str]:
    table = track.memory_bytes
    shape = (len(track.memory_ns), len(MemoryClass))
    if table.shape != shape or table.dtype.kind not in "iu" or (table < 0).any():
        yield f"memory_bytes is no table of {shape[0]} x {shape[1]} sizes"
    if (np.diff(track.memory_ns) < 0).any():
        yield "memory_ns does not rise"


def _is_column(column: npt.NDArray[np.int64]) -> bool:
    if column.ndim != 1 or column.dtype.kind not in "iu":
        return False
    return not len(column) or (int(column.min()) >= 0 and int(column.max()) <= rules.MAX_TIME_NS)

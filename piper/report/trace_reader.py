"""A Chrome trace that Piper wrote -> `Timeline`: for pictures and reports; memory comes from its counters."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from piper.errors import JobError
from simulator.plan.buffers import MemoryClass
from simulator.plan.task import TaskKind
from simulator.timeline.check import timeline_fault
from simulator.timeline.chrome import BY_CLASS
from simulator.timeline.timeline import RankTrack, Timeline

Event = Mapping[str, Any]

_PROCESS = re.compile(
    r"pp rank (?P<pipeline_rank>\d+)(?: \(x(?P<devices>\d+)\))?, stages? (?P<stages>[\d, ]*), rank"
)
_NS_PER_US = 1000


def timeline_of_trace(content: Mapping[str, Any], *, where: str) -> Timeline:
    """Rebuild the timeline; raises JobError for a trace that Piper did not write."""
    events = content["traceEvents"]
    by_process: defaultdict[int, list[Event]] = defaultdict(list)
    try:
        for event in events:
            by_process[event["pid"]].append(event)
        tracks = tuple(_track(by_process[pid], where) for pid in sorted(by_process))
        source = str(content["otherData"]["source"])
        if not tracks:
            raise _foreign(where, "has no events")
        timeline = Timeline(source=source, tracks=tracks, step_end_ns=_step_ends(tracks))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as problem:
        raise _foreign(where, f"lacks what Piper writes ({type(problem).__name__}: {problem})") from None
    fault = timeline_fault(timeline)
    if fault is not None:
        raise _foreign(where, f"contradicts itself: {fault}")
    return timeline


def _step_ends(tracks: Sequence[RankTrack]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return when the last rank finished each step; raises ValueError for a step without a span."""
    steps = 1 + max(int(track.step.max()) for track in tracks)
    if steps > sum(len(track.step) for track in tracks):
        raise ValueError(f"{steps} steps")
    ends = [
        max(int(track.end_ns[track.step == step].max(initial=-1)) for track in tracks)
        for step in range(steps)
    ]
    return np.array(ends, dtype=np.int64)


def _track(events: Sequence[Event], where: str) -> RankTrack:
    names = {(event["name"], event.get("tid")): event["args"] for event in events if event["ph"] == "M"}
    process = next((str(args["name"]) for (name, _), args in names.items() if name == "process_name"), "")
    match = _PROCESS.fullmatch(process)
    slices = [event for event in events if event["ph"] == "X"]
    if match is None or not slices:
        raise _foreign(where, f"has a process {process!r} that Piper does not write")
    threads = {tid: str(args["name"]) for (name, tid), args in names.items() if name == "thread_name"}
    stream_of = {tid: number for number, tid in enumerate(threads)}
    codes = tuple(dict.fromkeys(str(event["name"]) for event in slices))
    position = {code: number for number, code in enumerate(codes)}
    kinds = {position[event["name"]]: TaskKind[event["cat"]] for event in slices}
    counters = [event for event in events if event["ph"] == "C" and event["name"] == BY_CLASS]
    return RankTrack(
        rank=int(slices[0]["pid"]),
        n_devices=int(match["devices"] or 1),
        pipeline_rank=int(match["pipeline_rank"]),
        stages=tuple(int(stage) for stage in match["stages"].split(",") if stage.strip()),
        streams=tuple(threads.values()),
        task=np.array([position[event["name"]] for event in slices], dtype=np.int64),
        step=np.array([event["args"]["step"] for event in slices], dtype=np.int64),
        stream=np.array([stream_of[event["tid"]] for event in slices], dtype=np.int64),
        dispatch_ns=_nanoseconds([event["args"]["dispatched_us"] for event in slices]),
        ready_ns=_nanoseconds([event["args"]["ready_us"] for event in slices]),
        start_ns=_nanoseconds([event["ts"] for event in slices]),
        end_ns=_nanoseconds([event["ts"] + event["dur"] for event in slices]),
        memory_ns=_nanoseconds([event["ts"] for event in counters]),
        memory_bytes=np.array(
            [[event["args"].get(entry.name.lower(), 0) for entry in MemoryClass] for event in counters],
            dtype=np.int64,
        ).reshape(-1, len(MemoryClass)),
        codes=codes,
        kinds=np.array([kinds[number] for number in range(len(codes))], dtype=np.int64),
    )


def _nanoseconds(times_us: Sequence[float]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.rint(np.array(times_us, dtype=np.float64) * _NS_PER_US).astype(np.int64)


def _foreign(where: str, rule: str) -> JobError:
    return JobError(
        where=where,
        field="trace",
        value=where,
        rule=rule,
        fix="give a trace that `piper simulate --trace` or `piper run --trace` wrote",
    )

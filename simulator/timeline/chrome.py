"""Chrome trace: timeline -> JSON that Perfetto and chrome://tracing open.

One process per rank, one thread per stream, a slice per span named by its task code, flow arrows from
each send to its receive, and a counter of memory by class. Timestamps are microseconds with ns decimals.
Format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from simulator.errors import PlanError
from simulator.matching import match_tasks
from simulator.plan import MemoryClass, Plan, TaskKind
from simulator.timeline.timeline import RankTrack, Timeline

Event = dict[str, Any]


def write_chrome_trace(timeline: Timeline, path: str | Path, *, plan: Plan | None = None) -> Path:
    """Write the trace (gzip if `path` ends in .gz) and return its path; `plan` adds the flow arrows."""
    target = Path(path)
    text = json.dumps(chrome_trace(timeline, plan=plan), separators=(",", ":"), allow_nan=False)
    data = text.encode()
    try:
        target.write_bytes(gzip.compress(data, mtime=0) if target.suffix == ".gz" else data)
    except OSError as error:
        raise PlanError(
            where="trace",
            field="path",
            value=str(target),
            rule=f"cannot be written ({error.strerror})",
            fix="name a file in a folder that exists and is writable",
        ) from error
    return target


def chrome_trace(timeline: Timeline, *, plan: Plan | None = None) -> Event:
    """Return the trace as a JSON object; `plan` adds the flow arrows."""
    events: list[Event] = []
    for track in timeline.tracks:
        events += _names(track)
        events += _slices(track)
        events += _memory(track)
    if plan is not None:
        events += _flows(timeline, plan)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"source": timeline.source, "step_time_us": _us(timeline.step_time_ns)},
    }


def _us(time_ns: int) -> float:
    """Return microseconds; division by 1000 keeps three exact decimals below 2^53 ns (104 days)."""
    return time_ns / 1000


def _names(track: RankTrack) -> Iterator[Event]:
    stages = ", ".join(map(str, track.stages))
    shared = f" (x{track.n_devices})" if track.n_devices > 1 else ""
    name = f"rank {track.rank}{shared}: pipeline rank {track.pipeline_rank}, stages {stages}"
    yield _meta(track.rank, 0, "process_name", name=name)
    yield _meta(track.rank, 0, "process_sort_index", sort_index=track.rank)
    for number, stream in enumerate(track.streams):
        yield _meta(track.rank, number, "thread_name", name=stream)
        yield _meta(track.rank, number, "thread_sort_index", sort_index=number)


def _meta(pid: int, tid: int, what: str, **args: object) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def _slices(track: RankTrack) -> Iterator[Event]:
    columns = (
        track.task,
        track.step,
        track.stream,
        track.dispatch_ns,
        track.ready_ns,
        track.start_ns,
        track.end_ns,
    )
    kinds = track.kinds.tolist()
    for task, step, stream, dispatch, ready, start, end in zip(*(c.tolist() for c in columns), strict=True):
        yield {
            "ph": "X",
            "pid": track.rank,
            "tid": stream,
            "name": track.codes[task],
            "cat": TaskKind(kinds[task]).name,
            "ts": _us(start),
            "dur": _us(end - start),
            "args": {"step": step, "dispatched_us": _us(dispatch), "ready_us": _us(ready)},
        }


def _memory(track: RankTrack) -> Iterator[Event]:
    classes = [kind.name.lower() for kind in MemoryClass]
    for time, values in zip(track.memory_ns.tolist(), track.memory_bytes.tolist(), strict=True):
        yield {
            "ph": "C",
            "pid": track.rank,
            "name": "memory (bytes)",
            "ts": _us(time),
            "args": dict(zip(classes, values, strict=True)),
        }


def _flows(timeline: Timeline, plan: Plan) -> Iterator[Event]:
    """Yield an arrow from the start of each send to the start of its receive."""
    matching = match_tasks(plan)
    firsts = matching.device_starts.tolist()
    numbers = {device.pipeline_rank: number for number, device in enumerate(plan.device_plans)}
    by_rank = {track.rank: track for track in timeline.tracks}
    arrow = 0
    for track in timeline.tracks:
        number = numbers[track.pipeline_rank]
        device, first = plan.device_plans[number], firsts[number]
        sends = np.flatnonzero(matching.is_send[first : firsts[number + 1]])
        for task, peer in zip(sends.tolist(), device.tasks.peer[sends].tolist(), strict=True):
            target = by_rank[plan.peer_rank(track.rank, peer)]
            recv = int(matching.partner[first + task]) - firsts[numbers[peer]]
            for step in range(timeline.num_steps):
                yield _arrow_end(track, "s", arrow, span=step * len(device.tasks) + task)
                yield _arrow_end(target, "f", arrow, span=step * len(target.codes) + recv)
                arrow += 1


def _arrow_end(track: RankTrack, phase: str, arrow: int, *, span: int) -> Event:
    event = {
        "ph": phase,
        "id": arrow,
        "pid": track.rank,
        "tid": int(track.stream[span]),
        "name": "transfer",
        "cat": "transfer",
        "ts": _us(int(track.start_ns[span])),
    }
    return event | {"bp": "e"} if phase == "f" else event

"""Chrome trace: timeline -> JSON that Perfetto and chrome://tracing open.

One process per rank, one thread per stream, a slice per span named by its task code, flow arrows from
each send to its receive, counters of memory (by class, and their sum: Perfetto does not stack), and a mark at
the end of each step. Timestamps are microseconds with ns decimals.
Format: "Trace Event Format", Google, 2016.

[Note: numbers of threads]  Perfetto takes thread 0, and the one numbered like its process, for the main
    thread, so that both would share one line: compute streams have the number of their rank, which also puts
    them on top, and all others numbers above every rank. It writes the number of a process behind its name.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simulator.errors import PlanError
from simulator.matching import match_tasks
from simulator.plan import MemoryClass, Plan, TaskKind
from simulator.timeline.timeline import RankTrack, Timeline

Event = dict[str, Any]
TOTAL, BY_CLASS = "allocated (bytes)", "memory (bytes)"
"""Names of the counters."""
GZIP_LEVEL = 6
COLOURS = {
    TaskKind.F: "thread_state_runnable",
    TaskKind.B: "thread_state_running",
    TaskKind.BI: "rail_load",
    TaskKind.BW: "rail_idle",
    TaskKind.R: "thread_state_uninterruptible",
    TaskKind.NORM: "startup",
    TaskKind.UPDATE: "terrible",
    TaskKind.SEND_F: "generic_work",
    TaskKind.RECV_F: "generic_work",
    TaskKind.SEND_B: "generic_work",
    TaskKind.RECV_B: "generic_work",
    TaskKind.ALL_REDUCE: "black",
    TaskKind.REDUCE_SCATTER: "thread_state_unknown",
    TaskKind.ALL_GATHER: "olive",
    TaskKind.ALL_TO_ALL: "vsync_highlight_color",
    TaskKind.RING_SHIFT: "detailed_memory_dump",
    TaskKind.OFFLOAD: "cq_build_running",
    TaskKind.RELOAD: "cq_build_running",
}
"""Colour names that chrome://tracing knows, near those of our pictures; Perfetto has its own per name."""


def write_chrome_trace(timeline: Timeline, path: str | Path, *, plan: Plan | None = None) -> Path:
    """Write the trace (gzip if `path` ends in .gz) and return its path; `plan` adds the flow arrows."""
    target = Path(path)
    data = _text(timeline, plan).encode()
    try:
        packed = gzip.compress(data, compresslevel=GZIP_LEVEL, mtime=0) if target.suffix == ".gz" else data
        target.write_bytes(packed)
    except OSError as error:
        raise PlanError(
            where="trace",
            field="path",
            value=str(target),
            rule=f"cannot be written ({error.strerror})",
            fix="name a file in a folder that exists and is writable",
        ) from error
    return target


def chrome_trace(timeline: Timeline, *, plan: Plan | None = None) -> dict[str, Any]:
    """Return the trace as a JSON object; `plan` adds the flow arrows."""
    trace: dict[str, Any] = json.loads(_text(timeline, plan))
    return trace


def _text(timeline: Timeline, plan: Plan | None) -> str:
    """Write the events as text, piece by piece: a trace may have millions of them."""
    threads = _Threads.of(timeline)
    events: list[str] = []
    for track in timeline.tracks:
        events += map(_json, _names(track, threads))
        events += _slices(track, threads)
        events += _memory(track)
    if plan is not None:
        events += _flows(timeline, plan, threads)
    events += map(_json, _step_ends(timeline))
    other = _json({"source": timeline.source, "step_time_us": _us(timeline.step_time_ns)})
    return f'{{"traceEvents":[{",".join(events)}],"displayTimeUnit":"ms","otherData":{other}}}'


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _us(time_ns: int) -> float:
    """Return microseconds; division by 1000 keeps three exact decimals below 2^53 ns (104 days)."""
    return time_ns / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Threads:
    """Numbers of threads; see the note above.

    Args:
        above: larger than every rank.
        digits: of pipeline ranks, so that names sort like numbers.
    """

    above: int
    digits: int

    @classmethod
    def of(cls, timeline: Timeline) -> _Threads:
        ranks = max(track.rank for track in timeline.tracks)
        pipeline_ranks = max(track.pipeline_rank for track in timeline.tracks)
        return cls(above=10 ** max(3, len(str(ranks))), digits=len(str(pipeline_ranks)))

    def of_stream(self, track: RankTrack, stream: int) -> int:
        return self.above + stream if stream else track.rank


def _names(track: RankTrack, threads: _Threads) -> Iterator[Event]:
    alike = f" (x{track.n_devices})" if track.n_devices > 1 else ""
    plural = "s" if len(track.stages) != 1 else ""
    stages = ", ".join(map(str, track.stages))
    name = f"pp rank {track.pipeline_rank:0{threads.digits}}{alike}, stage{plural} {stages}, rank"
    first = threads.of_stream(track, 0)
    yield _meta(track.rank, first, "process_name", name=name)
    yield _meta(track.rank, first, "process_sort_index", sort_index=track.rank)
    for number, stream in enumerate(track.streams):
        yield _meta(track.rank, threads.of_stream(track, number), "thread_name", name=stream)
        yield _meta(track.rank, threads.of_stream(track, number), "thread_sort_index", sort_index=number)


def _meta(pid: int, tid: int, what: str, **args: object) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def _slices(track: RankTrack, threads: _Threads) -> Iterator[str]:
    heads = [
        f'{{"ph":"X","name":{_json(code)},"cat":"{TaskKind(kind).name}","cname":"{COLOURS[TaskKind(kind)]}",'
        f'"pid":{track.rank},"tid":'
        for code, kind in zip(track.codes, track.kinds.tolist(), strict=True)
    ]
    tids = [threads.of_stream(track, stream) for stream in range(len(track.streams))]
    columns = (
        track.task, track.step, track.stream, track.dispatch_ns, track.ready_ns, track.start_ns, track.end_ns,
    )  # fmt: skip
    for task, step, stream, dispatch, ready, start, end in zip(*(c.tolist() for c in columns), strict=True):
        yield (
            f'{heads[task]}{tids[stream]},"ts":{start / 1000},"dur":{(end - start) / 1000},'
            f'"args":{{"step":{step},"dispatched_us":{dispatch / 1000},"ready_us":{ready / 1000}}}}}'
        )


def _memory(track: RankTrack) -> Iterator[str]:
    """Yield counters of the classes that the rank uses, and of their sum."""
    used = np.flatnonzero(track.memory_bytes.any(axis=0)).tolist()
    head = f'{{"ph":"C","pid":{track.rank},"name":'
    keys = ",".join(f'"{MemoryClass(kind).name.lower()}":%d' for kind in used)
    totals = track.memory_bytes.sum(axis=1).tolist()
    rows = zip(track.memory_ns.tolist(), totals, track.memory_bytes[:, used].tolist(), strict=True)
    for time, total, by_class in rows:
        at = f'"ts":{time / 1000},"args":{{'
        yield f'{head}"{TOTAL}",{at}"bytes":{total}}}}}'
        yield f'{head}"{BY_CLASS}",{at}{keys % tuple(by_class)}}}}}'


def _step_ends(timeline: Timeline) -> Iterator[Event]:
    first = timeline.tracks[0].rank
    for step, end in enumerate(timeline.step_end_ns.tolist()):
        where = {"pid": first, "tid": first, "ts": _us(end), "cat": "step"}
        yield {"ph": "i", "s": "g", "name": f"end of step {step}"} | where


def _flows(timeline: Timeline, plan: Plan, threads: _Threads) -> Iterator[str]:
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
        peers = {peer: plan.peer_rank(track.rank, peer) for peer in set(device.tasks.peer[sends].tolist())}
        for task, peer in zip(sends.tolist(), device.tasks.peer[sends].tolist(), strict=True):
            target = by_rank[peers[peer]]
            recv = int(matching.partner[first + task]) - firsts[numbers[peer]]
            for step in range(timeline.num_steps):
                yield _arrow_end(track, "s", arrow, span=step * len(device.tasks) + task, threads=threads)
                yield _arrow_end(target, "f", arrow, span=step * len(target.codes) + recv, threads=threads)
                arrow += 1


def _arrow_end(track: RankTrack, phase: str, arrow: int, *, span: int, threads: _Threads) -> str:
    tid, start = threads.of_stream(track, int(track.stream[span])), int(track.start_ns[span])
    enclosing = ',"bp":"e"' if phase == "f" else ""
    return (
        f'{{"ph":"{phase}","id":{arrow},"pid":{track.rank},"tid":{tid},"name":"transfer","cat":"transfer",'
        f'"ts":{start / 1000}{enclosing}}}'
    )

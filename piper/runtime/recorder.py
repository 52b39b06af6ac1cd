"""From what a rank did to a measured `Timeline`: the same spans and task codes as a simulated one.

[Note: one clock]
Each rank records `time.perf_counter_ns`; rank 0 measured every other rank's offset once, by the reply with
the shortest round trip out of several (Cristian 1989). The timeline starts when the first rank starts.

[Note: time between steps]
Where no rank is in a step (verification compares there), the clock of the timeline stands still: the
distance between step ends is the time of a step.

[Note: on the wire]
A receive is posted early and waits; it is on the wire from the moment its send begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from simulator.matching import match_tasks
from simulator.plan import MemoryClass, Plan, TaskKind
from simulator.timeline.timeline import RankTrack, Timeline

Times = tuple[int, int, int, int]
"""(dispatch_ns, ready_ns, start_ns, end_ns)."""

NO_BYTES = [0] * len(MemoryClass)


@dataclass(slots=True, kw_only=True)
class Recorder:
    """Times of one rank's tasks; each (step, position) is written once, by the stream that ran it.

    Args:
        num_tasks: tasks per step.
        on: whether the times of tasks are kept; the begin and end of every step are in any case.
        times: per step, per dispatch position; empty unless `on`.
        bytes_: per step, per dispatch position: by class, [Note: bytes of a task].
        step_begin_ns, step_end_ns: per step.
    """

    num_tasks: int
    on: bool = True
    times: list[list[Times]] = field(default_factory=list)
    bytes_: list[list[list[int]]] = field(default_factory=list)
    step_begin_ns: list[int] = field(default_factory=list)
    step_end_ns: list[int] = field(default_factory=list)

    def begin_step(self, now_ns: int) -> None:
        """Open the next step."""
        self.times.append([(0, 0, 0, 0)] * self.num_tasks if self.on else [])
        self.bytes_.append([NO_BYTES] * self.num_tasks)
        self.step_begin_ns.append(now_ns)
        self.step_end_ns.append(now_ns)

    def record(self, step: int, position: int, times: Times) -> None:
        """Keep the times of one task."""
        self.step_end_ns[step] = max(self.step_end_ns[step], times[3])
        if self.on:
            self.times[step][position] = times

    def record_bytes(self, step: int, position: int, bytes_: list[int]) -> None:
        """Keep by how much one task changed what is held, by class."""
        self.bytes_[step][position] = bytes_


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank measured, ready to be sent to rank 0.

    Args:
        rank: whose.
        offset_ns: its clock minus that of rank 0.
        times: int64 [steps, tasks, 4]: dispatch, ready, start, end on its own clock; or no tasks.
        step_begin_ns, step_end_ns: int64 [steps].
        memory_ns: int64 [changes]; memory_bytes: int64 [changes, classes].
        peak_memory_bytes: highest bytes at any moment.
    """

    rank: int
    offset_ns: int
    times: np.ndarray
    step_begin_ns: np.ndarray
    step_end_ns: np.ndarray
    memory_ns: np.ndarray
    memory_bytes: np.ndarray
    peak_memory_bytes: int


def rank_record(
    recorder: Recorder,
    *,
    rank: int,
    offset_ns: int,
    memory: list[tuple[int, tuple[int, ...]]],
    peak_memory_bytes: int,
) -> RankRecord:
    """Pack what a rank measured."""
    steps = len(recorder.times)
    times = np.array(recorder.times, dtype=np.int64).reshape(
        steps, recorder.num_tasks if recorder.on else 0, 4
    )
    return RankRecord(
        rank=rank,
        offset_ns=offset_ns,
        times=times,
        step_begin_ns=np.array(recorder.step_begin_ns, dtype=np.int64),
        step_end_ns=np.array(recorder.step_end_ns, dtype=np.int64),
        memory_ns=np.array([time_ns for time_ns, _ in memory], dtype=np.int64),
        memory_bytes=np.array([totals for _, totals in memory], dtype=np.int64).reshape(-1, len(MemoryClass)),
        peak_memory_bytes=peak_memory_bytes,
    )


def measured_timeline(plan: Plan, records: list[RankRecord]) -> Timeline:
    """Return all ranks on one clock that starts at 0 [Notes: one clock, time between steps, on the wire]."""
    begins, ends = _steps(records)
    pauses = _pauses(begins, ends)
    tracks = {record.rank: _track(plan, record, pauses) for record in records}
    _start_receives(plan, tracks)
    return Timeline(
        source="measured",
        tracks=tuple(tracks[record.rank] for record in records),
        step_end_ns=_without(pauses, ends),
    )


def step_times_s(records: list[RankRecord]) -> list[float]:
    """Return per step the time from the end of the step before (or its own begin, if later) to its end."""
    begins, ends = _steps(records)
    return [float(t) for t in np.diff(_without(_pauses(begins, ends), ends), prepend=0) / 1e9]


def _steps(records: list[RankRecord]) -> tuple[np.ndarray, np.ndarray]:
    """Return when the first rank begins and the last ends each step, int64 [steps], on rank 0's clock."""
    begins = np.array([record.step_begin_ns - record.offset_ns for record in records]).min(axis=0)
    ends = np.array([record.step_end_ns - record.offset_ns for record in records]).max(axis=0)
    return begins, ends


def _pauses(begins: np.ndarray, ends: np.ndarray) -> list[tuple[int, int]]:
    """Return (begin, end) of the time before the first step and of that between steps, on rank 0's clock."""
    between = [
        (int(end), int(begin)) for end, begin in zip(ends[:-1], begins[1:], strict=True) if begin > end
    ]
    return [(0, int(begins[0])), *between]


def _without(pauses: list[tuple[int, int]], times_ns: np.ndarray) -> np.ndarray:
    """Return times on a clock that stands still in the pauses; what happens in a pause, at its begin."""
    shifted = times_ns
    for begin, end in pauses:
        shifted = shifted - np.clip(times_ns - begin, 0, end - begin)
    return shifted


def _track(plan: Plan, record: RankRecord, pauses: list[tuple[int, int]]) -> RankTrack:
    home = plan.pipeline_rank_of(record.rank)
    device = plan.device_plans[home]
    steps, tasks, _ = record.times.shape
    shifted = _without(pauses, record.times.reshape(-1, 4) - record.offset_ns)
    return RankTrack(
        rank=record.rank,
        n_devices=1,
        pipeline_rank=home,
        stages=device.stages,
        streams=device.streams,
        task=np.tile(np.arange(tasks, dtype=np.int64), steps),
        step=np.repeat(np.arange(steps, dtype=np.int64), tasks),
        stream=np.tile(device.tasks.stream[:tasks], steps),
        dispatch_ns=shifted[:, 0],
        ready_ns=shifted[:, 1],
        start_ns=shifted[:, 2].copy(),
        end_ns=shifted[:, 3],
        memory_ns=_without(pauses, record.memory_ns - record.offset_ns),
        memory_bytes=record.memory_bytes,
        codes=device.codes(),
        kinds=device.tasks.kind,
    )


def _start_receives(plan: Plan, tracks: dict[int, RankTrack]) -> None:
    """Move the start of each receive to the start of its send, within the receive's own time."""
    matching = match_tasks(plan)
    numbers = {device.pipeline_rank: number for number, device in enumerate(plan.device_plans)}
    firsts = matching.device_starts
    for rank, track in tracks.items():
        first = int(firsts[numbers[track.pipeline_rank]])
        peers = plan.device_plans[numbers[track.pipeline_rank]].tasks.peer
        for task in np.flatnonzero(np.isin(track.kinds, [TaskKind.RECV_F, TaskKind.RECV_B])).tolist():
            sender = tracks[plan.peer_rank(rank, int(peers[task]))]
            send = int(matching.partner[first + task] - firsts[numbers[sender.pipeline_rank]])
            mine = slice(task, None, len(track.codes))
            sent_ns = sender.start_ns[send :: len(sender.codes)]
            track.start_ns[mine] = np.clip(sent_ns, track.ready_ns[mine], track.end_ns[mine])

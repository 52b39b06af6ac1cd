"""From what a rank did to a measured `Timeline`: the same spans and task codes as a simulated one.

[Note: one clock]
Each rank records `time.perf_counter_ns`; rank 0 measured every other rank's offset once, by the reply with
the shortest round trip out of several (Cristian 1989). The timeline starts when the first rank starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from simulator.plan import MemoryClass, Plan
from simulator.timeline.timeline import RankTrack, Timeline

Times = tuple[int, int, int, int]
"""(dispatch_ns, ready_ns, start_ns, end_ns)."""


@dataclass(slots=True, kw_only=True)
class Recorder:
    """Times of one rank's tasks; each (step, position) is written once, by the stream that ran it.

    Args:
        num_tasks: tasks per step.
        times: per step, per dispatch position.
        step_begin_ns: per step.
    """

    num_tasks: int
    times: list[list[Times]] = field(default_factory=list)
    step_begin_ns: list[int] = field(default_factory=list)

    def begin_step(self, now_ns: int) -> None:
        """Open the next step."""
        self.times.append([(0, 0, 0, 0)] * self.num_tasks)
        self.step_begin_ns.append(now_ns)

    def record(self, step: int, position: int, times: Times) -> None:
        """Keep the times of one task."""
        self.times[step][position] = times


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank measured, ready to be sent to rank 0.

    Args:
        rank: whose.
        offset_ns: its clock minus that of rank 0.
        times: int64 [steps, tasks, 4]: dispatch, ready, start, end on its own clock.
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
    times = np.array(recorder.times, dtype=np.int64)
    return RankRecord(
        rank=rank,
        offset_ns=offset_ns,
        times=times,
        step_begin_ns=np.array(recorder.step_begin_ns, dtype=np.int64),
        step_end_ns=times[:, :, 3].max(axis=1),
        memory_ns=np.array([time_ns for time_ns, _ in memory], dtype=np.int64),
        memory_bytes=np.array([totals for _, totals in memory], dtype=np.int64).reshape(-1, len(MemoryClass)),
        peak_memory_bytes=peak_memory_bytes,
    )


def measured_timeline(plan: Plan, records: list[RankRecord]) -> Timeline:
    """Return all ranks on one clock that starts at 0."""
    zero = min(int(record.step_begin_ns[0]) - record.offset_ns for record in records)
    ends = np.array([record.step_end_ns - record.offset_ns - zero for record in records])
    return Timeline(
        source="measured",
        tracks=tuple(_track(plan, record, zero) for record in records),
        step_end_ns=ends.max(axis=0),
    )


def step_times_s(records: list[RankRecord]) -> list[float]:
    """Return per step the time from the end of the step before (or its own begin, if later) to its end."""
    begins = np.array([record.step_begin_ns - record.offset_ns for record in records]).min(axis=0)
    ends = np.array([record.step_end_ns - record.offset_ns for record in records]).max(axis=0)
    starts = np.maximum(begins, np.concatenate([begins[:1], ends[:-1]]))
    return [float(t) for t in (ends - starts) / 1e9]


def _track(plan: Plan, record: RankRecord, zero: int) -> RankTrack:
    home = plan.pipeline_rank_of(record.rank)
    device = plan.device_plans[home]
    steps, tasks, _ = record.times.shape
    shifted = record.times.reshape(-1, 4) - (record.offset_ns + zero)
    return RankTrack(
        rank=record.rank,
        n_devices=1,
        pipeline_rank=home,
        stages=device.stages,
        streams=device.streams,
        task=np.tile(np.arange(tasks, dtype=np.int64), steps),
        step=np.repeat(np.arange(steps, dtype=np.int64), tasks),
        stream=np.tile(device.tasks.stream, steps),
        dispatch_ns=shifted[:, 0],
        ready_ns=shifted[:, 1],
        start_ns=shifted[:, 2],
        end_ns=shifted[:, 3],
        memory_ns=np.maximum(record.memory_ns - (record.offset_ns + zero), 0),
        memory_bytes=record.memory_bytes,
        codes=device.codes(),
        kinds=device.tasks.kind,
    )

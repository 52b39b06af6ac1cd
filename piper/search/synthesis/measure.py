"""A simulated plan -> a pipeline: what passes of each stage take, what they hold, what room ranks have.

[Note: measured passes]
What a pass takes is the time from its first task to its last, the median of all microbatches of the first
step: waiting for collectives inside the pass counts, waiting for other stages does not. Recomputation belongs
to BI. A hop is the shortest time from the end of a pass to the arrival of its result.
[Note: measured bytes]
Buffers that are born in one pass of a microbatch (or in its collectives and transfers) and die in a later one
are what a stage holds: from F to BI, or up to BW, for which BI may make more. What a rank holds beside them
is the difference between the simulated peak and that of the same order counted in this way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from piper.schedules.synthesis.pipeline import Pipeline
from piper.schedules.synthesis.timing import Timer, order_of_rows
from simulator.plan import DevicePlan, Plan, Task, TaskKind
from simulator.plan.task import NONE
from simulator.timeline.timeline import RankTrack, Timeline

Ints = npt.NDArray[np.int64]

F, BI, BW = range(3)
_PASS = {TaskKind.F: F, TaskKind.R: BI, TaskKind.B: BI, TaskKind.BI: BI, TaskKind.BW: BW}
_SHOWN = {TaskKind.F: "F", TaskKind.B: "B", TaskKind.BI: "BI", TaskKind.BW: "BW"}
_UNBOUNDED = 2**60

Key = tuple[int, int, int]
"""Stage, pass, microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """What stages cost and hold, by stage; see [Note: measured passes] and [Note: measured bytes].

    Args:
        cost_ns: of F, BI and BW, int64 [3, S].
        hop_ns: from each stage to the next one, int64 [S - 1].
        held_bytes, left_bytes: int64 [S].
    """

    cost_ns: Ints
    hop_ns: Ints
    held_bytes: Ints
    left_bytes: Ints


def pipeline_of(plan: Plan, timeline: Timeline, *, num_microbatches: int, spare_bytes: int) -> Pipeline:
    """Return the pipeline of a simulated plan, for as many microbatches as asked.

    Args:
        plan, timeline: of any number of microbatches, one step or more; no stage has copies.
        num_microbatches: of the pipeline.
        spare_bytes: what the worst rank may hold beyond its peak; < 0: what it must hold less.

    Raises: ValueError if a rank has no room for one microbatch.
    """
    found = _passes(plan, timeline)
    stages = tuple(device.stages for device in plan.device_plans)
    fused = not any(np.any(device.tasks.kind == TaskKind.BW) for device in plan.device_plans)
    counted = _pipeline(found, stages, num_microbatches=plan.training.num_microbatches, fused=fused)
    peaks = np.array([int(track.memory_bytes.sum(axis=1).max()) for track in timeline.tracks])
    _, _, held = Timer(pipeline=counted).replay(order_of_rows(counted, _rows(plan)))
    room = held + int(peaks.max()) - peaks + spare_bytes
    caps = tuple(int(each) for each in room)
    return _pipeline(found, stages, num_microbatches=num_microbatches, fused=fused, caps=caps)


def _pipeline(
    found: Passes,
    stages: tuple[tuple[int, ...], ...],
    *,
    num_microbatches: int,
    fused: bool,
    caps: tuple[int, ...] = (),
) -> Pipeline:
    forward, inputs, weights = (tuple(row) for row in found.cost_ns.tolist())
    return Pipeline(
        stages=stages,
        num_microbatches=num_microbatches,
        forward_ns=forward,
        inputs_ns=inputs,
        weights_ns=weights,
        hop_ns=tuple(found.hop_ns.tolist()),
        held_bytes=tuple(found.held_bytes.tolist()),
        left_bytes=tuple(found.left_bytes.tolist()),
        cap_bytes=caps or (_UNBOUNDED,) * len(stages),
        fused=fused,
    )


def _passes(plan: Plan, timeline: Timeline) -> Passes:
    count = sum(len(device.stages) for device in plan.device_plans)
    spent: dict[tuple[int, int], list[int]] = {}
    ends: dict[Key, int] = {}
    arrivals: dict[Key, int] = {}
    for device, track in zip(plan.device_plans, timeline.tracks, strict=True):
        for key, start, end in _spans(device, track):
            spent.setdefault(key[:2], []).append(end - start)
            ends[key] = end
        arrivals |= _arrivals(device, track)
    cost = np.zeros((3, count), dtype=np.int64)
    for (stage, which), values in spent.items():
        cost[which, stage] = int(np.median(values))
    hop = np.zeros(max(0, count - 1), dtype=np.int64)
    for s in range(count - 1):
        ways = [
            at - ends[s, F, m] for (stage, which, m), at in arrivals.items() if (stage, which) == (s + 1, F)
        ]
        hop[s] = max(0, min(ways, default=0))
    held, left = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for device in plan.device_plans:
        for stage in device.stages:
            held[stage], left[stage] = _held(device, stage)
    return Passes(cost_ns=cost, hop_ns=hop, held_bytes=held, left_bytes=left)


def _spans(device: DevicePlan, track: RankTrack) -> Iterator[tuple[Key, int, int]]:
    """Yield each pass of the first step, from its first task to its last; what R takes comes on top."""
    first: dict[Key, int] = {}
    last: dict[Key, int] = {}
    extra: dict[Key, int] = {}
    tasks = device.tasks
    kinds = tasks.kind[track.task]
    wanted = (track.step == track.step[0]) & np.isin(kinds, np.array(list(_PASS)))
    for i in np.flatnonzero(wanted).tolist():
        position = int(track.task[i])
        kind = TaskKind(int(kinds[i]))
        key = (int(tasks.stage[position]), _PASS[kind], int(tasks.microbatch[position]))
        start, end = int(track.start_ns[i]), int(track.end_ns[i])
        if kind is TaskKind.R and key not in first:
            extra[key] = extra.get(key, 0) + end - start
            continue
        first[key] = min(first.get(key, start), start)
        last[key] = max(last.get(key, end), end)
    for key, start in first.items():
        yield key, start - extra.get(key, 0), last[key]


def _arrivals(device: DevicePlan, track: RankTrack) -> dict[Key, int]:
    """Return when the inputs of forwards were received, by the stage that needs them."""
    tasks = device.tasks
    wanted = (track.step == track.step[0]) & (tasks.kind[track.task] == TaskKind.RECV_F)
    found: dict[Key, int] = {}
    for i in np.flatnonzero(wanted).tolist():
        position = int(track.task[i])
        key = (int(tasks.stage[position]), F, int(tasks.microbatch[position]))
        found[key] = max(found.get(key, 0), int(track.end_ns[i]))
    return found


def _held(device: DevicePlan, stage: int) -> tuple[int, int]:
    """Return what a microbatch in the middle holds on a stage from F to BI, and from BI to BW."""
    tasks, buffers = device.tasks, device.buffers
    own = np.flatnonzero(tasks.stage == stage)
    microbatch = int(tasks.microbatch[own].max()) // 2
    born: dict[int, int] = {}
    dies: dict[int, int] = {}
    for i in own[tasks.microbatch[own] == microbatch].tolist():
        born |= dict.fromkeys(tasks.allocates.row(i), _pass_of(tasks.task(i)))
        dies |= dict.fromkeys(tasks.frees.row(i), _pass_of(tasks.task(i)))
    lives = [(born[buffer], dies.get(buffer, BW), int(buffers.size_bytes[buffer])) for buffer in born]
    held = sum(size for start, end, size in lives if start == F < end)
    left = sum(size for start, end, size in lives if start < BW == end)
    return held, left


def _pass_of(task: Task) -> int:
    """Return the pass that a task belongs to: itself, or what its collective or transfer serves."""
    kind = TaskKind(task.kind if task.phase == NONE else task.phase)
    if kind in _PASS:
        return _PASS[kind]
    return F if kind in {TaskKind.SEND_F, TaskKind.RECV_F} else BI


def _rows(plan: Plan) -> list[list[str]]:
    """Return the order of a plan's passes: by their last tasks."""
    rows = []
    for device in plan.device_plans:
        tasks = device.tasks
        codes: dict[str, None] = {}
        for i in np.flatnonzero(np.isin(tasks.kind, np.array(list(_SHOWN)))).tolist():
            kind = _SHOWN[TaskKind(int(tasks.kind[i]))]
            code = f"{int(tasks.stage[i])}{kind}{int(tasks.microbatch[i])}"
            codes.pop(code, None)
            codes[code] = None
        rows.append(list(codes))
    return rows

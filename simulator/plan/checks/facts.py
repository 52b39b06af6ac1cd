"""`Facts`: what the checks need to know of a plan, computed once.

[Note: happens before]
On one device, task a happens before task b when a has surely completed before b starts: a is earlier on
b's stream, or b waits for a, or a chain of both. Each task gets a clock: per stream, the last dispatch
position that surely completed before it starts. Streams run in dispatch order, so a happens before b
exactly when `clocks[b, stream of a] >= a`. Other devices are not consulted: that a peer has answered says
nothing about our own streams that an event of ours does not say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from simulator.plan.plan import DevicePlan, Plan

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceFacts:
    """One device plan and its order.

    Args:
        plan: the device plan.
        previous: the task before on the same stream, or -1.
        clocks: int64 [tasks, streams], see [Note: happens before]; no rows when waits are circular.
        stuck: tasks that no order can start, because they wait in a circle or behind one.
    """

    plan: DevicePlan
    previous: tuple[int, ...]
    clocks: Indices
    stuck: tuple[int, ...]

    @property
    def rank(self) -> int:
        """Return the pipeline rank."""
        return self.plan.pipeline_rank

    @cached_property
    def codes(self) -> tuple[str, ...]:
        """Return task codes by dispatch position (made when the first violation needs a name)."""
        return self.plan.codes()

    def before(self, first: Indices, second: Indices) -> npt.NDArray[np.bool_]:
        """Return, pair by pair, whether `first` has surely completed when `second` starts."""
        done: npt.NDArray[np.bool_] = self.clocks[second, self.plan.tasks.stream[first]] >= first
        return done

    def name(self, task: int) -> str:
        """Return the task with its rank, e.g. "rank 1: 2F0"."""
        return f"rank {self.rank}: {self.codes[task]}"

    def names(self, tasks: Sequence[int]) -> tuple[str, ...]:
        """Return `name` of several tasks."""
        return tuple(self.name(task) for task in tasks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Facts:
    """A plan whose indices are in range, device by device.

    Args:
        plan: the plan.
        devices: facts by pipeline rank.
        owner: pipeline rank by stage.
    """

    plan: Plan
    devices: tuple[DeviceFacts, ...]
    owner: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan) -> Facts:
        """Compute the facts of `plan`."""
        owners = {stage: device.pipeline_rank for device in plan.device_plans for stage in device.stages}
        return cls(
            plan=plan,
            devices=tuple(_device_facts(device) for device in plan.device_plans),
            owner=tuple(owners[stage] for stage in sorted(owners)),
        )


def _device_facts(device: DevicePlan) -> DeviceFacts:
    streams, waits = device.tasks.stream.tolist(), device.tasks.waits.to_rows()
    previous = _previous_on_stream(streams, len(device.streams))
    order, stuck = _start_order(previous, waits)
    num_streams = len(device.streams)
    clocks = [] if stuck else _clocks(order, waits, streams=streams, previous=previous, width=num_streams)
    return DeviceFacts(
        plan=device,
        previous=tuple(previous),
        clocks=np.array(clocks, dtype=np.int64).reshape(len(clocks), num_streams),
        stuck=tuple(stuck),
    )


def _previous_on_stream(streams: Sequence[int], num_streams: int) -> list[int]:
    last = [-1] * num_streams
    previous = []
    for task, stream in enumerate(streams):
        previous.append(last[stream])
        last[stream] = task
    return previous


def _start_order(previous: Sequence[int], waits: Sequence[Sequence[int]]) -> tuple[Sequence[int], list[int]]:
    """Return an order in which tasks can start, and the tasks that never can."""
    num_tasks = len(previous)
    if all(wait < task for task, row in enumerate(waits) for wait in row):
        return range(num_tasks), []
    missing = [len(row) + (before >= 0) for row, before in zip(waits, previous, strict=True)]
    followers: list[list[int]] = [[] for _ in range(num_tasks)]
    for task, (row, before) in enumerate(zip(waits, previous, strict=True)):
        for wait in (*row, before) if before >= 0 else row:
            followers[wait].append(task)
    order = [task for task in range(num_tasks) if missing[task] == 0]
    for task in order:
        for follower in followers[task]:
            missing[follower] -= 1
            if missing[follower] == 0:
                order.append(follower)
    return order, [task for task in range(num_tasks) if missing[task]]


def _clocks(
    order: Sequence[int],
    waits: Sequence[Sequence[int]],
    *,
    streams: Sequence[int],
    previous: Sequence[int],
    width: int,
) -> list[list[int]]:
    clocks: list[list[int]] = [[]] * len(order)
    for task in order:
        before = previous[task]
        clock = [-1] * width if before < 0 else clocks[before][:]
        if before >= 0:
            clock[streams[task]] = before
        for wait in waits[task]:
            if clock[streams[wait]] < wait:
                clock = [max(pair) for pair in zip(clock, clocks[wait], strict=True)]
                clock[streams[wait]] = max(clock[streams[wait]], wait)
        clocks[task] = clock
    return clocks

"""`Facts`: what the checks need to know of a plan, computed once.

[Note: happens before]
On one device, task a happens before task b when a has surely completed before b starts: a is earlier on
b's stream, or b waits for a, or a chain of both. Each task gets a clock: per other stream, the last
dispatch position that surely completed before it starts. Streams run in dispatch order, so for two tasks
of one stream their positions tell, else a happens before b exactly when `clock[stream of a] >= a`. Tasks
of a stream share one clock until one of them waits for news, so there are fewer clocks than tasks. Other
devices are not consulted: that a peer has answered says nothing about our own streams that an event of
ours does not say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from simulator.plan.checks.passes import Passes, passes_of
from simulator.plan.plan import DevicePlan, Plan
from simulator.plan.task import NONE, TaskKind

Indices = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceFacts:
    """One device plan and its order.

    Args:
        plan: the device plan.
        previous: the task before on the same stream, or -1.
        clocks: int64 [clocks, streams], see [Note: happens before]; no rows when waits are circular.
        clock_of: int64 [tasks], row of `clocks`.
        stuck: tasks that no order can start, because they wait in a circle or behind one.
    """

    plan: DevicePlan
    previous: Indices
    clocks: Indices
    clock_of: Indices
    stuck: tuple[int, ...]

    @property
    def rank(self) -> int:
        """Return the pipeline rank."""
        return self.plan.pipeline_rank

    @cached_property
    def codes(self) -> tuple[str, ...]:
        """Return task codes by dispatch position (made when the first violation needs a name)."""
        return self.plan.codes()

    def before(self, first: Indices, second: Indices) -> Flags:
        """Return, pair by pair, whether `first` has surely completed when `second` starts."""
        streams = self.plan.tasks.stream
        done: Flags = np.where(
            streams[first] == streams[second],
            first < second,
            self.clocks[self.clock_of[second], streams[first]] >= first,
        )
        return done

    def comes_before(self, first: int, second: int) -> bool:
        """Return `before` of one pair."""
        return bool(self.before(np.array([first]), np.array([second]))[0])

    def name(self, task: int) -> str:
        """Return the task with its rank, e.g. "rank 1: 2F0"."""
        return f"rank {self.rank}: {self.codes[task]}"

    def names(self, tasks: Sequence[int]) -> tuple[str, ...]:
        """Return `name` of several tasks."""
        return tuple(self.name(task) for task in tasks)


@dataclass(frozen=True, kw_only=True, eq=False)
class Facts:
    """A plan whose indices are in range, device by device.

    Args:
        plan: the plan.
        devices: facts by pipeline rank.
        homes: by stage the pipeline ranks that hold it; several where a stage has several copies.
    """

    plan: Plan
    devices: tuple[DeviceFacts, ...]
    homes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, plan: Plan) -> Facts:
        """Compute the facts of `plan`."""
        homes: dict[int, list[int]] = {}
        for device in plan.device_plans:
            for stage in device.stages:
                homes.setdefault(stage, []).append(device.pipeline_rank)
        return cls(
            plan=plan,
            devices=tuple(_device_facts(device) for device in plan.device_plans),
            homes=tuple(tuple(homes[stage]) for stage in sorted(homes)),
        )

    @cached_property
    def place(self) -> Indices:
        """Return int64 [stages, microbatches]: the pipeline rank that runs a microbatch of a stage.

        Of a stage with several copies: the one that has its forward (NONE: none has).
        """
        table = np.full((len(self.homes), self.plan.training.num_microbatches), NONE, dtype=np.int64)
        for device in self.devices:
            tasks = device.plan.tasks
            rows = np.flatnonzero((tasks.kind == TaskKind.F) & np.isin(tasks.stage, device.plan.stages))
            table[tasks.stage[rows], tasks.microbatch[rows]] = device.rank
        for stage, ranks in enumerate(self.homes):
            if len(ranks) == 1:
                table[stage] = ranks[0]
        return table

    @cached_property
    def stage_of_segment(self) -> Indices:
        """Return the stage of every segment."""
        return np.array([segment.stage for segment in self.plan.segments], dtype=np.int64)

    @cached_property
    def needs_backward(self) -> Flags:
        """Return which segments have a backward pass: those with an output that needs a gradient."""
        needs = [any(output.requires_grad for output in one.outputs) for one in self.plan.segments]
        return np.array(needs, dtype=np.bool_)

    @cached_property
    def passes(self) -> tuple[Passes, ...]:
        """Return which task runs each pass of each segment, by pipeline rank."""
        count = self.plan.training.num_microbatches
        return tuple(
            passes_of(device.plan, self.stage_of_segment, num_microbatches=count) for device in self.devices
        )


def _device_facts(device: DevicePlan) -> DeviceFacts:
    num_streams = len(device.streams)
    previous = _previous_on_stream(device.tasks.stream, num_streams)
    order, stuck = _start_order(device, previous)
    clocks, clock_of = ([], []) if stuck else _clocks(device, order)
    return DeviceFacts(
        plan=device,
        previous=previous,
        clocks=np.array(clocks, dtype=np.int64).reshape(len(clocks), num_streams),
        clock_of=np.array(clock_of, dtype=np.int64),
        stuck=tuple(stuck),
    )


def _previous_on_stream(streams: Indices, num_streams: int) -> Indices:
    previous = np.full(len(streams), NONE, dtype=np.int64)
    for stream in range(num_streams):
        tasks = np.flatnonzero(streams == stream)
        previous[tasks[1:]] = tasks[:-1]
    return previous


def _start_order(device: DevicePlan, previous: Indices) -> tuple[Sequence[int], list[int]]:
    """Return an order in which tasks can start, and the tasks that never can."""
    lists, num_tasks = device.tasks.waits, len(previous)
    if (lists.values < np.repeat(np.arange(num_tasks), np.diff(lists.starts))).all():
        return range(num_tasks), []
    waits = lists.to_rows()
    missing = [len(row) + (before >= 0) for row, before in zip(waits, previous.tolist(), strict=True)]
    followers: list[list[int]] = [[] for _ in range(num_tasks)]
    for task, (row, before) in enumerate(zip(waits, previous.tolist(), strict=True)):
        for wait in (*row, before) if before >= 0 else row:
            followers[wait].append(task)
    order = [task for task in range(num_tasks) if missing[task] == 0]
    for task in order:
        for follower in followers[task]:
            missing[follower] -= 1
            if missing[follower] == 0:
                order.append(follower)
    return order, [task for task in range(num_tasks) if missing[task]]


def _clocks(device: DevicePlan, order: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """Return the distinct clocks, and the clock of each task ([Note: happens before])."""
    streams, waits = device.tasks.stream.tolist(), device.tasks.waits.to_rows()
    clocks: list[list[int]] = [[NONE] * len(device.streams)]
    clock_of = [0] * len(streams)
    latest = [0] * len(device.streams)
    for task in order:
        stream = streams[task]
        number = latest[stream]
        clock, own = clocks[number], True
        for wait in waits[task]:
            other = streams[wait]
            if other == stream or clock[other] >= wait:
                continue
            if own:
                number, own = len(clocks), False
                clock = clock[:]
                clocks.append(clock)
            news = clocks[clock_of[wait]]
            clock[:] = map(max, clock, news)
            clock[other] = max(clock[other], wait)
        clock_of[task] = latest[stream] = number
    return clocks, clock_of

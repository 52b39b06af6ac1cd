"""What the tasks of the reference engine run on: all at full speed, or links and devices that are shared.

`SharedMachine` implements [Note: flows], [Note: latency, then wire], [Note: link sharing],
[Note: spinning kernels] and [Note: computation under sharing] of `simulator.rules`. It works out every speed
anew whenever anything has changed; which speeds can have changed is the fast engine's business.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import simpy

from simulator import rules
from simulator.plan import NONE
from simulator.sharing import Sharing
from simulator.sharing.fair import fair_speeds
from simulator.workload import Workload

Process = Generator[simpy.Event, Any, None]
_LAST = 2
"""SimPy's priority of what comes after everything else in a ns."""


class _EndOfNs(simpy.Event):
    """Comes when everything else of the present ns has happened."""

    def __init__(self, env: simpy.Environment) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        env.schedule(self, priority=_LAST)  # type: ignore[arg-type]  # any int: SimPy sorts by it


class Machine(Protocol):
    """Where tasks run."""

    def run(self, task: int, duration_ns: int) -> Process:
        """Run a flow to its end; `task` is who drives it: the sender, or the first member of a collective."""

    def join(self, task: int) -> None:
        """Take part in a communication from now on."""

    def leave(self, task: int) -> None:
        """Take part no more."""


def machine_of(workload: Workload, env: simpy.Environment) -> Machine:
    """Return the machine of a workload."""
    if workload.sharing is None:
        return UnsharedMachine(env)
    return SharedMachine(workload, workload.sharing, env)


class UnsharedMachine:
    """Everything runs at full speed."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env

    def run(self, task: int, duration_ns: int) -> Process:
        """Take the time that it takes alone."""
        if duration_ns:
            yield self._env.timeout(duration_ns)

    def join(self, task: int) -> None:
        """Hold nothing."""

    def leave(self, task: int) -> None:
        """Give nothing back."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Flow:
    """Something that runs.

    Args:
        task: who drives it.
        done: triggered at its end.
        left: what is left of it, in ns at full speed, at time `since`.
        speed: of what it does alone; 0: just begun.
        due: the event of its end as known now, or None.
    """

    task: int
    done: simpy.Event
    left: float
    since: int
    speed: float = 0.0
    due: simpy.Event | None = None

    def end_if(self, event: simpy.Event) -> None:
        """End, unless the flow has been timed anew since."""
        if event is self.due:
            self.done.succeed()


@dataclass(kw_only=True, slots=True, eq=False)
class _Device:
    """What happens on a device: by stream what computes, and the communication that it takes part in."""

    computing: dict[int, _Flow] = field(default_factory=dict)
    held: int = 0


class SharedMachine:
    """Flows by the stream of the task that drives them: a stream runs one task at a time."""

    def __init__(self, workload: Workload, sharing: Sharing, env: simpy.Environment) -> None:
        self._env = env
        self._work = workload
        self._sharing = sharing
        self._stream = workload.stream.tolist()
        free = len(sharing.growth) - 1
        self._row = np.where(workload.price == NONE, free, workload.price).tolist()
        self._is_compute = workload.is_compute.tolist()
        self._devices = [_Device() for _ in range(workload.num_devices)]
        counts = np.diff(workload.device_starts)
        self._device = np.repeat(np.arange(workload.num_devices), counts).tolist()
        self._moving: dict[int, _Flow] = {}
        self._unsettled = False

    def run(self, task: int, duration_ns: int) -> Process:
        """Run at changing speeds; see [Note: flows]."""
        latency = 0 if self._is_compute[task] else int(self._sharing.latency_ns[self._row[task]])
        latency = rules.latency_ns(latency, duration_ns)
        if latency:
            yield self._env.timeout(latency)
        if duration_ns == latency:
            return
        flow = _Flow(
            task=task,
            done=simpy.Event(self._env),
            left=float(duration_ns - latency),
            since=int(self._env.now),
        )
        stream = self._stream[task]
        among = self._devices[self._device[task]].computing if self._is_compute[task] else self._moving
        among[stream] = flow
        self._settle_at_the_end_of_this_ns()
        yield flow.done
        del among[stream]
        self._settle_at_the_end_of_this_ns()

    def join(self, task: int) -> None:
        """Hold the processors of a communication kernel; see [Note: spinning kernels]."""
        self._hold(task, int(self._sharing.processors[task]))

    def leave(self, task: int) -> None:
        """Give the processors back."""
        self._hold(task, -int(self._sharing.processors[task]))

    def _hold(self, task: int, processors: int) -> None:
        self._devices[self._device[task]].held += processors
        self._settle_at_the_end_of_this_ns()

    def _settle_at_the_end_of_this_ns(self) -> None:
        if self._unsettled:
            return
        self._unsettled = True
        _EndOfNs(self._env).callbacks.append(self._settle)

    def _settle(self, _: simpy.Event) -> None:
        """Give every flow its speed, from the streams' first to last."""
        self._unsettled = False
        moving = [self._moving[stream] for stream in sorted(self._moving)]
        for flow, speed in zip(moving, self._link_speeds(moving), strict=True):
            self._set_speed(flow, speed)
        taken = self._memory_taken(moving)
        for device, found in zip(self._devices, taken, strict=True):
            for flow, speed in self._compute_speeds(device, found):
                self._set_speed(flow, speed)

    def _link_speeds(self, moving: list[_Flow]) -> list[float]:
        """Return the max-min fair speeds; see [Note: link sharing]."""
        share = self._sharing
        entries = [
            (number, int(share.links[entry]), float(share.uses[entry]))
            for number, flow in enumerate(moving)
            for entry in range(*share.link_starts[self._row[flow.task] : self._row[flow.task] + 2].tolist())
        ]
        wanted = [0.0] * share.num_links
        for _, link, use in entries:
            wanted[link] += use
        tight = [entry for entry in entries if wanted[entry[1]] > 1.0]
        slowed = sorted({number for number, _, _ in tight})
        speeds = np.empty(len(slowed))
        fair_speeds(
            np.cumsum([0, *(sum(entry[0] == number for entry in tight) for number in slowed)]),
            np.array([link for _, link, _ in tight], dtype=np.int64),
            np.array([use for _, _, use in tight]),
            np.array([share.growth[self._row[moving[number].task]] for number in slowed]),
            np.empty(share.num_links),
            np.empty(share.num_links),
            speeds,
        )
        by_number = dict(zip(slowed, speeds.tolist(), strict=True))
        return [by_number.get(number, 1.0) for number in range(len(moving))]

    def _memory_taken(self, moving: list[_Flow]) -> list[float]:
        """Return by device the fraction of the memory bandwidth that communication takes."""
        taken = [0.0] * len(self._devices)
        for flow in moving:
            for member in self._members(flow.task):
                taken[self._device[member]] += float(self._sharing.memory[self._row[flow.task]]) * flow.speed
        return taken

    def _members(self, task: int) -> list[int]:
        """Return the tasks that take part in what `task` drives."""
        work = self._work
        if work.collective[task] != NONE:
            return list(work.members.row(int(work.collective[task])))
        return [task] if work.partner[task] == NONE else [task, int(work.partner[task])]

    def _compute_speeds(self, device: _Device, taken: float) -> list[tuple[_Flow, float]]:
        """Return what computes on a device, and how fast; see [Note: computation under sharing]."""
        share, found = self._sharing, []
        for stream, flow in sorted(device.computing.items()):
            row, rank = self._row[flow.task], share.priority[stream]
            ranks = [int(share.priority[other]) for other in device.computing]
            processors = rules.processor_share(device.held, share.num_processors, ranks.count(rank))
            if max(ranks) > rank:
                processors = rules.processor_share(share.num_processors, share.num_processors, 1)
            memory = rules.memory_share(taken, float(share.memory[row]), len(ranks))
            parts = float(share.processor_part[row]), float(share.memory_part[row])
            found.append((flow, rules.compute_speed(*parts, processors, memory)))
        return found

    def _set_speed(self, flow: _Flow, speed: float) -> None:
        """Time a flow anew if its speed has changed."""
        if speed == flow.speed:
            return
        now = int(self._env.now)
        flow.left = rules.flow_left(flow.left, now - flow.since, flow.speed)
        flow.since, flow.speed = now, speed
        due = self._env.timeout(rules.flow_ns(flow.left, speed))
        flow.due = due
        due.callbacks.append(flow.end_if)

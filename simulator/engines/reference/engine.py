"""The reference engine: one SimPy process per host thread and per stream; Workload in, times out.

It implements [Note: host dispatch], [Note: host-bound tasks], [Note: stream start], [Note: eager send],
[Note: rendezvous send], [Note: additive skew] and [Note: host copy] of `simulator.rules`. A process states
*when* something holds as a number and wakes those who wait for the number, so few events are needed. Ties are
SimPy's: (time, priority, sequence). Rules of streams (priority, processors) are not read: nothing contends.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import simpy

from simulator import rules
from simulator.engines import EngineRun, Settled
from simulator.errors import IllegalPlanError
from simulator.hang import Hang
from simulator.plan import NONE
from simulator.workload import Workload

PENDING = -1
Process = Generator[simpy.Event, Any, None]


def run(workload: Workload, *, max_steps: int, settled: Settled) -> EngineRun:
    """Run the workload; see `simulator.engines.Engine`."""
    state = _State(workload, max_steps=max_steps, settled=settled)
    for device in range(workload.num_devices):
        first, last = workload.device_starts[device : device + 2].tolist()
        state.env.process(_host(state, range(first, last)))
    for stream, tasks in enumerate(state.tasks_by_stream):
        state.env.process(_stream(state, stream, tasks))
    try:
        state.env.run(until=state.stop)
    except RuntimeError:  # SimPy: no event is left, and `stop` was not triggered
        if state.stop.triggered:
            raise
        hang = Hang(workload=workload, heads=state.heads, end=state.end, joined=state.joined)
        raise IllegalPlanError(where="simulate: the plan hangs", violations=hang.sentences()) from None
    return state.result()


class _Signals:
    """Events by key, made only for those who wait."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._events: dict[int, simpy.Event] = {}

    def of(self, key: int) -> simpy.Event:
        event = self._events.get(key)
        if event is None:
            event = self._events[key] = simpy.Event(self._env)
        return event

    def give(self, key: int) -> None:
        event = self._events.pop(key, None)
        if event is not None:
            event.succeed()


class _State:
    """What has happened so far. An *instance* is a task in a step: step * num_tasks + task."""

    def __init__(self, workload: Workload, *, max_steps: int, settled: Settled) -> None:
        self.env = simpy.Environment()
        self.stop = simpy.Event(self.env)
        self.num_tasks = workload.num_tasks
        self.max_steps = max_steps
        self.settled = settled
        self.is_compute = workload.is_compute.tolist()
        self.is_host_copy = workload.is_host_copy.tolist()
        self.is_send = workload.is_send.tolist()
        self.eager = workload.eager.tolist()
        self.duration = workload.duration_ns.tolist()
        self.launch = workload.launch_ns.tolist()
        self.host = workload.host_ns.tolist()
        self.waits = workload.waits.to_rows()
        self.previous_step_waits = workload.previous_step_waits.to_rows()
        self.partner = workload.partner.tolist()
        self.collective = workload.collective.tolist()
        self.group_size = np.diff(workload.members.starts).tolist()
        self.tasks_by_stream: list[list[int]] = [[] for _ in range(workload.num_streams)]
        for task, stream in enumerate(workload.stream.tolist()):
            self.tasks_by_stream[stream].append(task)
        self.heads = [NONE] * workload.num_streams
        instances = self.num_tasks * max_steps
        self.first_launch = [PENDING] * instances
        self.dispatch = [PENDING] * instances
        self.joined = [PENDING] * instances
        self.ready = [PENDING] * instances
        self.start = [PENDING] * instances
        self.end = [PENDING] * instances
        self.arrivals = [0] * (len(self.group_size) * max_steps)
        self.latest_arrival = [0] * (len(self.group_size) * max_steps)
        self.remaining = [self.num_tasks] * max_steps
        self.step_end: list[int] = []
        self.queued = _Signals(self.env)
        self.completed = _Signals(self.env)
        self.met = _Signals(self.env)
        self.gathered = _Signals(self.env)

    def finish(self, instance: int, start: int, end: int) -> None:
        self.start[instance] = start
        self.end[instance] = end
        self.completed.give(instance)
        step = instance // self.num_tasks
        self.remaining[step] -= 1
        if self.remaining[step] == 0 and not self.stop.triggered:
            self.step_end.append(end)
            if len(self.step_end) == self.max_steps or self.settled(self.step_end):
                self.stop.succeed()

    def result(self) -> EngineRun:
        steps = len(self.step_end)

        def column(values: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
            return np.array(values[: steps * self.num_tasks], dtype=np.int64).reshape(steps, self.num_tasks)

        return EngineRun(
            dispatch_ns=column(self.dispatch),
            ready_ns=column(self.ready),
            start_ns=column(self.start),
            end_ns=column(self.end),
            step_end_ns=np.array(self.step_end, dtype=np.int64),
        )


def _host(state: _State, tasks: range) -> Process:
    """Launch the tasks of one device in dispatch order, step after step; see [Note: host dispatch]."""
    env = state.env
    for step in range(state.max_steps):
        for task in tasks:
            instance = step * state.num_tasks + task
            now = int(env.now)
            state.first_launch[instance] = rules.first_launch_ns(now, state.launch[task])
            state.dispatch[instance] = rules.dispatch_ns(now, state.host[task])
            state.queued.give(instance)
            if state.host[task]:
                yield env.timeout(state.host[task])


def _stream(state: _State, stream: int, tasks: list[int]) -> Process:
    """Run the tasks of one stream one after another; see [Note: stream start]."""
    free = 0
    for step in range(state.max_steps):
        offset = step * state.num_tasks
        for task in tasks:
            instance = state.heads[stream] = offset + task
            if state.first_launch[instance] == PENDING:
                yield state.queued.of(instance)
            waits_done = 0
            for wait in _instances_waited_for(state, task, step):
                if state.end[wait] == PENDING:
                    yield state.completed.of(wait)
                waits_done = max(waits_done, state.end[wait])
            ready = rules.ready_ns(free, waits_done)
            if state.is_compute[task]:
                yield from _compute(state, instance, task, ready=ready)
            elif state.is_host_copy[task]:
                yield from _host_copy(state, instance, task, ready=ready)
            elif state.collective[task] != NONE:
                yield from _collective(state, instance, task, ready=ready)
            elif state.is_send[task]:
                yield from _send(state, instance, task, ready=ready)
            else:
                yield from _recv(state, instance, task, ready=ready)
            free = state.end[instance]
    state.heads[stream] = NONE


def _instances_waited_for(state: _State, task: int, step: int) -> list[int]:
    offset = step * state.num_tasks
    here = [offset + wait for wait in state.waits[task]]
    if step == 0 or not state.previous_step_waits[task]:
        return here
    return here + [offset - state.num_tasks + wait for wait in state.previous_step_waits[task]]


def _compute(state: _State, instance: int, task: int, *, ready: int) -> Process:
    state.ready[instance] = ready
    start = rules.compute_start_ns(ready, state.first_launch[instance])
    end = rules.compute_end_ns(start, state.duration[task], state.dispatch[instance])
    yield from _occupy(state, instance, start=start, end=end)


def _host_copy(state: _State, instance: int, task: int, *, ready: int) -> Process:
    """Copy between device and host; see [Note: host copy]."""
    state.ready[instance] = ready
    start = rules.host_copy_start_ns(ready, state.dispatch[instance])
    yield from _occupy(state, instance, start=start, end=rules.wire_end_ns(start, state.duration[task]))


def _send(state: _State, instance: int, task: int, *, ready: int) -> Process:
    """Send; see [Note: eager send] and [Note: rendezvous send]."""
    recv = instance - task + state.partner[task]
    joined = _join(state, instance, ready)
    state.met.give(recv)
    start = joined
    if not state.eager[task]:
        if state.joined[recv] == PENDING:
            yield state.met.of(instance)
        start = rules.rendezvous_start_ns(joined, state.joined[recv])
    end = rules.wire_end_ns(start, state.duration[task])
    yield from _occupy(state, instance, start=start, end=end)


def _recv(state: _State, instance: int, task: int, *, ready: int) -> Process:
    """Receive; see [Note: eager send] and [Note: rendezvous send]."""
    send = instance - task + state.partner[task]
    joined = _join(state, instance, ready)
    state.met.give(send)
    if state.joined[send] == PENDING:
        yield state.met.of(instance)
    sent = state.joined[send]
    if state.eager[task]:
        start = rules.eager_recv_start_ns(sent, joined)
        end = rules.eager_recv_end_ns(sent, joined, state.duration[task])
    else:
        start = rules.rendezvous_start_ns(sent, joined)
        end = rules.wire_end_ns(start, state.duration[task])
    yield from _occupy(state, instance, start=start, end=end)


def _collective(state: _State, instance: int, task: int, *, ready: int) -> Process:
    """Take part in a collective; see [Note: additive skew]."""
    number = state.collective[task]
    key = instance // state.num_tasks * len(state.group_size) + number
    joined = _join(state, instance, ready)
    state.latest_arrival[key] = rules.collective_start_ns(state.latest_arrival[key], joined)
    state.arrivals[key] += 1
    if state.arrivals[key] < state.group_size[number]:
        yield state.gathered.of(key)
    else:
        state.gathered.give(key)
    start = state.latest_arrival[key]
    end = rules.wire_end_ns(start, state.duration[task])
    yield from _occupy(state, instance, start=start, end=end)


def _join(state: _State, instance: int, ready: int) -> int:
    joined = rules.joined_ns(ready, state.dispatch[instance])
    state.ready[instance] = state.joined[instance] = joined
    return joined


def _occupy(state: _State, instance: int, *, start: int, end: int) -> Process:
    """Hold the stream until `end`, then tell those who wait."""
    if end > state.env.now:
        yield state.env.timeout(end - state.env.now)
    state.finish(instance, start, end)

"""The reference engine: one SimPy process per host thread and per stream; Workload in, times out.

It implements every note of `simulator.rules`. What a task does on the device is one step of a process:
`Machine.run` takes its time at full speed, or, where things are shared, at changing speeds. Ties are SimPy's:
(time, priority, sequence); they change nothing: what happens in one ns is known by numbers, not by turns.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import simpy

from simulator import rules
from simulator.engines import EngineRun, Settled
from simulator.engines.reference.machine import Machine, machine_of
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
        hang = Hang(
            workload=workload,
            heads=state.heads,
            end=state.end,
            joined=state.joined,
            dispatch=state.dispatch,
        )
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
    """What has happened so far. An *instance* is a task in a step: step * num_tasks + task.

    A *meeting* is a collective, or a message that is not eager: (step, number), numbered by its first task.
    """

    def __init__(self, workload: Workload, *, max_steps: int, settled: Settled) -> None:
        self.env = simpy.Environment()
        self.stop = simpy.Event(self.env)
        self.machine: Machine = machine_of(workload, self.env)
        self.num_tasks = workload.num_tasks
        self.max_steps = max_steps
        self.settled = settled
        self.is_compute = workload.is_compute.tolist()
        self.is_host_copy = workload.is_host_copy.tolist()
        self.is_send = workload.is_send.tolist()
        self.eager = workload.eager.tolist()
        self.durations = [workload.step_duration_ns(step).tolist() for step in range(max_steps)]
        self.launch = workload.launch_ns.tolist()
        self.host = workload.host_ns.tolist()
        self.host_waits = workload.host_waits.to_rows()
        self.waits = workload.waits.to_rows()
        self.previous_step_waits = workload.previous_step_waits.to_rows()
        self.partner = workload.partner.tolist()
        self.collective = workload.collective.tolist()
        self.members = workload.members.to_rows()
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
        self.arrivals = [0] * instances
        self.remaining = [self.num_tasks] * max_steps
        self.step_end: list[int] = []
        self.queued = _Signals(self.env)
        self.completed = _Signals(self.env)
        self.moved = _Signals(self.env)

    @property
    def now(self) -> int:
        """Return the present time in ns."""
        return int(self.env.now)

    def finish(self, instance: int, *, start: int) -> None:
        """Let a task end now, and tell those who wait."""
        self.start[instance] = start
        self.end[instance] = self.now
        self.completed.give(instance)
        step = instance // self.num_tasks
        self.remaining[step] -= 1
        if self.remaining[step] == 0 and not self.stop.triggered:
            self.step_end.append(self.now)
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
    for step in range(state.max_steps):
        for task in tasks:
            instance = step * state.num_tasks + task
            for wait in _instances(state, state.host_waits[task], step):
                if state.end[wait] == PENDING:
                    yield state.completed.of(wait)
            now = state.now
            state.first_launch[instance] = rules.first_launch_ns(now, state.launch[task])
            state.dispatch[instance] = rules.dispatch_ns(now, state.host[task])
            state.queued.give(instance)
            yield from _until(state, state.dispatch[instance])


def _stream(state: _State, stream: int, tasks: list[int]) -> Process:
    """Run the tasks of one stream one after another; see [Note: stream start]."""
    free = 0
    for step in range(state.max_steps):
        for task in tasks:
            instance = state.heads[stream] = step * state.num_tasks + task
            if state.first_launch[instance] == PENDING:
                yield state.queued.of(instance)
            waits_done = 0
            previous = [wait - state.num_tasks for wait in state.previous_step_waits[task]]
            for wait in _instances(state, state.waits[task] + previous, step):
                if state.end[wait] == PENDING:
                    yield state.completed.of(wait)
                waits_done = max(waits_done, state.end[wait])
            yield from _run(state, instance, task, ready=rules.ready_ns(free, waits_done))
            free = state.end[instance]
    state.heads[stream] = NONE


def _run(state: _State, instance: int, task: int, *, ready: int) -> Process:
    """Run a task, whose stream and waits are ready, to its end."""
    if state.is_compute[task]:
        return _compute(state, instance, task, ready=ready)
    if state.is_host_copy[task]:
        return _host_copy(state, instance, task, ready=ready)
    if state.collective[task] != NONE:
        members = state.members[state.collective[task]]
        return _meet(state, instance, task, ready=ready, members=members)
    sends, partner = state.is_send[task], state.partner[task]
    if not state.eager[task]:
        ends = [task, partner] if sends else [partner, task]
        return _meet(state, instance, task, ready=ready, members=ends)
    return (_eager_send if sends else _eager_recv)(state, instance, task, ready=ready)


def _instances(state: _State, tasks: list[int], step: int) -> list[int]:
    """Return tasks as instances; a negative number is a task of the step before, which step 0 lacks."""
    return [step * state.num_tasks + task for task in tasks if step or task >= 0]


def _until(state: _State, time_ns: int) -> Process:
    if time_ns > state.now:
        yield state.env.timeout(time_ns - state.now)


def _compute(state: _State, instance: int, task: int, *, ready: int) -> Process:
    """Compute; see [Note: host dispatch] and [Note: host-bound tasks]."""
    state.ready[instance] = ready
    start = rules.compute_start_ns(ready, state.first_launch[instance])
    yield from _until(state, start)
    yield from state.machine.run(task, _duration(state, instance))
    yield from _until(state, rules.compute_end_ns(start, state.now - start, state.dispatch[instance]))
    state.finish(instance, start=start)


def _host_copy(state: _State, instance: int, task: int, *, ready: int) -> Process:
    """Copy between device and host; see [Note: host copy]."""
    state.ready[instance] = ready
    start = rules.host_copy_start_ns(ready, state.dispatch[instance])
    yield from _until(state, start)
    yield from state.machine.run(task, _duration(state, instance))
    state.finish(instance, start=start)


def _eager_send(state: _State, instance: int, task: int, *, ready: int) -> Process:
    """Send without waiting for the receive; see [Note: eager send]."""
    start = yield from _join(state, instance, task, ready=ready)
    yield from state.machine.run(task, _duration(state, instance))
    state.machine.leave(task)
    state.finish(instance, start=start)


def _eager_recv(state: _State, instance: int, task: int, *, ready: int) -> Process:
    """Receive what may be there already; see [Note: eager send]."""
    send = instance - task + state.partner[task]
    joined = yield from _join(state, instance, task, ready=ready)
    if state.end[send] == PENDING:
        yield state.completed.of(send)
    state.machine.leave(task)
    state.finish(instance, start=rules.eager_recv_start_ns(state.joined[send], joined))


def _meet(state: _State, instance: int, task: int, *, ready: int, members: list[int]) -> Process:
    """Take part in a collective or a rendezvous; see [Note: additive skew] and [Note: rendezvous send]."""
    meeting = instance - task + members[0]
    yield from _join(state, instance, task, ready=ready)
    state.arrivals[meeting] += 1
    if state.arrivals[meeting] == len(members):
        yield from state.machine.run(members[0], _duration(state, meeting))
        state.moved.give(meeting)
    else:
        yield state.moved.of(meeting)
    state.machine.leave(task)
    joined = [state.joined[instance - task + member] for member in members]
    state.finish(instance, start=max(joined))


def _join(state: _State, instance: int, task: int, *, ready: int) -> Generator[simpy.Event, Any, int]:
    """Take part from when the device is ready and has launched its kernel; return that time."""
    joined = rules.joined_ns(ready, state.dispatch[instance])
    yield from _until(state, joined)
    state.ready[instance] = state.joined[instance] = joined
    state.machine.join(task)
    return joined


def _duration(state: _State, instance: int) -> int:
    found: int = state.durations[instance // state.num_tasks][instance % state.num_tasks]
    return found

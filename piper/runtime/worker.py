"""One rank: `for task in dispatch order: wait, run, record, free`. No schedule knowledge.

[Note: the same plan]
The worker reads nothing but its device plan: order, streams, waits. What a task does is in `handlers/`.
Tensors are let go by their last reader, which the plan's reads determine (`routes.py`).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter, perf_counter_ns, sleep
from typing import NoReturn, assert_never

import torch

from cost_models.errors import check_invariant
from piper.runtime.borders import is_exchange
from piper.runtime.context import RankContext
from piper.runtime.delays import Delays
from piper.runtime.devices.device import Mark
from piper.runtime.handlers import collectives, compute, exchanges, host, rehearsal, transfers, update
from piper.runtime.handlers.buckets import buckets_of
from piper.runtime.init import batch_of_step
from piper.runtime.pool import Pool
from piper.runtime.progress import Phase, Report
from piper.runtime.recorder import Recorder
from piper.runtime.step import StepState
from piper.runtime.streams import StreamThread
from simulator.plan import HOST_COPY_KINDS, Task, TaskKind

_STEPS_UNDER_WAY = 2
"""A step may begin while transfers of the one before are still on their way."""

_LOOK_S = 0.2
"""How often a waiting stream looks whether another stream has failed."""

_HOLD_LOOK_S = 1e-3
"""How often a task that is held looks whether it may start."""


class TaskFailedError(Exception):
    """An exception inside a task; its cause is the original one."""

    def __init__(self, *, step: int, position: int) -> None:
        self.step = step
        self.position = position
        super().__init__(f"step {step}, task {position}")


class _StoppedError(Exception):
    """Another stream failed: the one that raises this gives up."""


@dataclass(slots=True, kw_only=True)
class Flight:
    """A step under way.

    Args:
        state: its tensors.
        done: one event per task: the host has issued it.
        begins, ends: per task, its first and last moment on its stream [Note: issued and done].
        dispatch_ns: per task, when the host came to it.
        before: the step before, while it is under way too.
        known_bytes: per task, what it changes of the bytes held, where that is known [Note: steps alike].
    """

    state: StepState
    done: list[threading.Event]
    begins: list[Mark]
    ends: list[Mark]
    dispatch_ns: list[int]
    before: Flight | None
    known_bytes: list[list[int]] | None = None


@dataclass(slots=True, kw_only=True)
class Worker:
    """Executes the device plan of one rank, step after step.

    Args:
        context: plan, code, state.
        recorder: keeps the times.
        report: tells the launcher what this rank does.
    """

    context: RankContext
    recorder: Recorder
    report: Report
    _tasks: tuple[Task, ...] = field(init=False)
    _streams: dict[int, StreamThread] = field(init=False)
    _flights: list[Flight] = field(default_factory=list)
    _failure: TaskFailedError | None = None
    _failed: threading.Event = field(default_factory=threading.Event)
    _pool: Pool = field(init=False)

    def __post_init__(self) -> None:
        self._pool = Pool(self.context.device)
        self._tasks = self.context.routes.tasks
        self.context.halves.update(rehearsal.rehearse(self.context))
        names = self.context.routes.device.streams
        first = 1 if self.context.settings.delays is None else 0  # [Note: a thread for each stream]
        threads = enumerate(names) if self.context.device.threads else ()
        self._streams = {i: StreamThread(name) for i, name in threads if i >= first}
        for stream in self._streams.values():
            stream.start()

    def run_step(self, number: int) -> StepState:
        """Dispatch all tasks of a step; transfers and collectives may still be under way on return.

        Raises: TaskFailedError naming the task.
        """
        settings = self.context.settings
        batch = batch_of_step(self.context.plan, seed=settings.seed, step=number, padding=settings.padding)
        routes, ledger = self.context.routes, self.context.ledger
        device, count = self.context.device, len(self._tasks)
        state = StepState.new(
            routes, number=number, batch=batch, ledger=ledger, pool=self._pool, device=device
        )
        if len(self._flights) == _STEPS_UNDER_WAY:
            self._finish(self._flights.pop(0))
        before = self._flights[-1] if self._flights else None
        flight = Flight(
            state=state,
            done=[threading.Event() for _ in self._tasks],
            begins=[None] * count,
            ends=[None] * count,
            dispatch_ns=[0] * count,
            before=before,
            known_bytes=self._known_bytes(number),
        )
        self._flights.append(flight)
        self.recorder.begin_step(perf_counter_ns())
        for position, task in enumerate(self._tasks):
            dispatch_ns = perf_counter_ns()
            if task.stream in self._streams:
                self._streams[task.stream].submit(partial(self._perform_aside, flight, position, dispatch_ns))
            else:
                self._perform(flight, position, dispatch_ns)
        return state

    def _known_bytes(self, number: int) -> list[list[int]] | None:
        """Return the bytes of each task once two complete steps had the same [Note: steps alike]."""
        measured = self.recorder.bytes_
        if number <= _STEPS_UNDER_WAY or measured[0] != measured[1]:
            return None
        copies = any(task.kind in HOST_COPY_KINDS for task in self._tasks)  # these hold from step to step
        return None if copies else measured[1]

    def drain(self) -> None:
        """Wait until every task of every step is complete."""
        while self._flights:
            self._finish(self._flights.pop(0))

    def close(self) -> None:
        """End the stream threads."""
        for stream in self._streams.values():
            stream.finish()
            stream.join()

    def _finish(self, flight: Flight) -> None:
        device, limit_s = self.context.device, self.context.settings.timeout_s
        for position in range(len(self._tasks)):
            self._wait(flight, position, for_position=position)
            device.reach(flight.ends[position], limit_s=limit_s)
            begin_ns, end_ns = device.ns(flight.begins[position]), device.ns(flight.ends[position])
            times = (flight.dispatch_ns[position], begin_ns, begin_ns, end_ns)
            self.recorder.record(flight.state.number, position, times)
        flight.before = None
        flight.state.let_go()

    def _perform_aside(self, flight: Flight, position: int, dispatch_ns: int) -> None:
        try:
            self._perform(flight, position, dispatch_ns)
        except TaskFailedError as failure:
            self._failure = self._failure or failure
            self._failed.set()
            flight.state.stop()
        except _StoppedError:
            return

    def _perform(self, flight: Flight, position: int, dispatch_ns: int) -> None:
        with self.context.device.on_stream(self.context.routes.device.streams[self._tasks[position].stream]):
            self._perform_here(flight, position, dispatch_ns)
        flight.done[position].set()

    def _perform_here(self, flight: Flight, position: int, dispatch_ns: int) -> None:
        task, step, device = self._tasks[position], flight.state.number, self.context.device
        for waited in task.waits:
            self._wait(flight, waited, for_position=position)
            device.wait(flight.ends[waited])
        if flight.before is not None:
            for waited in task.previous_step_waits:
                self._wait(flight.before, waited, for_position=position)
                device.wait(flight.before.ends[waited])
        if self.context.settings.delays is not None:
            self._delay(flight, position, self.context.settings.delays)
        known = None if flight.known_bytes is None else flight.known_bytes[position]
        flight.dispatch_ns[position], flight.begins[position] = dispatch_ns, device.mark()
        if task.stream == 0:
            self.report(Phase.RUNNING, step=step, position=position)
        try:
            with (
                torch.no_grad(),
                self.context.ledger.task(known) as change,
                buckets_of(self.context, flight.state, task),
            ):
                perform(self.context, flight.state, task)
        except Exception as error:
            raise TaskFailedError(step=step, position=position) from error
        if self.recorder.on:
            self.context.ledger.mark()
        flight.ends[position] = device.mark()
        self.recorder.record_bytes(step, position, change)

    def _delay(self, flight: Flight, position: int, delays: Delays) -> None:
        rank, step = self.context.rank, flight.state.number
        sleep(delays.before(rank, step=step, position=position))
        for hold in delays.holds:
            if (hold.rank, hold.position) == (rank, position):
                end = perf_counter() + delays.hold_s
                while perf_counter() < end and not self._is_done(step + hold.next_step, hold.until):
                    sleep(_HOLD_LOOK_S)

    def _is_done(self, step: int, position: int) -> bool:
        flights = [flight for flight in self._flights if flight.state.number == step]
        return any(flight.done[position].is_set() for flight in flights)

    def _wait(self, flight: Flight, position: int, *, for_position: int) -> None:
        event = flight.done[position]
        if event.is_set():
            return
        main = threading.current_thread() is threading.main_thread()
        if main:
            step = flight.state.number
            self.report(Phase.WAITING, step=step, position=for_position, waits_for=position)
        while not event.wait(_LOOK_S):
            if self._failed.is_set():
                self._stop(main=main)

    def _stop(self, *, main: bool) -> NoReturn:
        if main and self._failure is not None:
            raise self._failure
        raise _StoppedError


def perform(context: RankContext, step: StepState, task: Task) -> None:  # noqa: C901, PLR0912
    """Do what a task's kind says; one case per kind, so that a new kind is missed by the type checker."""
    if is_exchange(task):
        exchanges.exchange(context, step, task)
        return
    match task.kind:
        case TaskKind.F:
            compute.forward(context, step, task)
        case TaskKind.R:
            compute.recompute(context, step, task)
        case TaskKind.B:
            compute.backward(context, step, task)
        case TaskKind.BI:
            compute.backward_inputs(context, step, task)
        case TaskKind.BW:
            compute.backward_weights(context, step, task)
        case TaskKind.SEND_F:
            transfers.send_activations(context, step, task)
        case TaskKind.RECV_F:
            transfers.receive_activations(context, step, task)
        case TaskKind.SEND_B:
            transfers.send_gradients(context, step, task)
        case TaskKind.RECV_B:
            transfers.receive_gradients(context, step, task)
        case TaskKind.ALL_REDUCE:
            collectives.all_reduce(context, step, task)
        case TaskKind.REDUCE_SCATTER:
            collectives.reduce_scatter(context, step, task)
        case TaskKind.ALL_GATHER:
            collectives.all_gather(context, step, task)
        case TaskKind.NORM:
            update.norm(context, step, task)
        case TaskKind.UPDATE:
            update.update(context, step, task)
        case TaskKind.OFFLOAD:
            host.offload(context, step, task)
        case TaskKind.RELOAD:
            host.reload(context, step, task)
        case TaskKind.ALL_TO_ALL | TaskKind.RING_SHIFT:
            check_invariant(False, f"{task.kind.name} outside of a microbatch")
        case _:
            assert_never(task.kind)

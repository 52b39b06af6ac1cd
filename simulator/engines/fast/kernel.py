"""The compiled part of the fast engine: flat arrays in, times of all tasks out.

The scalar functions of `simulator.rules` are compiled unchanged, so that both engines implement the same
notes: [Note: host dispatch], [Note: run-ahead limit], [Note: blocking calls], [Note: host-bound tasks],
[Note: stream start], [Note: eager send], [Note: rendezvous send], [Note: additive skew], [Note: host copy].
Where links and devices are shared, `shared_kernel` runs instead.

[Note: streams as a worklist]  Nothing contends, so every time is a sum or a maximum of other times, and the
    order in which they are computed does not matter. A stream advances while all that its head needs is
    known. Otherwise it is kept by the one task that it waits for, or by its transfer or collective, and is
    taken up again when that is known. Every task and every wait is looked at once: the cost is linear.
[Note: arrays as arguments]  Numba counts references whenever an array is taken out of a tuple, which costs
    more than a task does. So functions take arrays one by one, and what belongs together is a record.
[Note: compiled once per machine] is in `simulator.compiled`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from simulator import compiled, rules
from simulator.compiled import (
    bare,
    collective_start_ns,
    compute_end_ns,
    compute_start_ns,
    dispatch_ns,
    eager_recv_end_ns,
    eager_recv_start_ns,
    first_launch_ns,
    host_copy_start_ns,
    host_goes_on_ns,
    joined_ns,
    kept,
    ready_ns,
    rendezvous_start_ns,
    text_of,
    wire_end_ns,
)

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Records = npt.NDArray[Any]

PENDING = -1
COMPUTE, HOST_COPY, COLLECTIVE, SEND, RECV, EAGER_SEND, EAGER_RECV = range(7)
DISPATCH, READY, START, END = range(4)
"""Rows of `times`, int64 [4, instances]. An *instance* is a task in a step: step * num_tasks + task."""

TASK = np.dtype(
    [
        ("duration", np.int64),
        ("launch", np.int64),
        ("host", np.int64),
        ("stream", np.int32),
        ("other", np.int32),  # the other end of a transfer, or the number of a collective
        ("following", np.int32),  # the next task on the same stream, or PENDING
        ("kept", np.int32),  # the first of the streams that wait for this task, or PENDING
        ("row", np.int32),  # where things are shared: its kind of flow,
        ("processors", np.int32),  # and what it holds as a communication
        ("kind", np.int8),
    ],
    align=True,
)
"""A task in one cache line."""
STREAM = np.dtype(
    [
        ("first", np.int64),  # its first task, or PENDING
        ("task", np.int64),  # its head: the task that comes next, or PENDING
        ("offset", np.int64),  # the instance of task 0 in the step of its head
        ("free", np.int64),  # when the task before its head ended
        ("waited", np.int64),  # how many waits of its head are done,
        ("waits_done", np.int64),  # and when the last of these was
        ("next_kept", np.int64),  # the next stream that waits for the same task, or PENDING
        ("device", np.int32),
        ("unlaunched", np.int32),  # whether it waits for the host to launch its head
    ]
)
HOST = np.dtype(
    [
        ("first", np.int64),  # its tasks
        ("last", np.int64),
        ("first_stream", np.int64),  # the streams of its device
        ("last_stream", np.int64),
        ("task", np.int64),  # the task that it launches next,
        ("offset", np.int64),  # and the instance of task 0 in its step
        ("free", np.int64),  # when it has launched the one before
        ("awaited", np.int64),  # the instance whose end it awaits, or PENDING
    ]
)
GROUP = np.dtype([("first", np.int64), ("last", np.int64), ("arrivals", np.int64), ("latest", np.int64)])
"""A collective: its members are `members[first:last]`; how many have joined, and when the latest did."""


@bare
def _kind(is_compute: bool, is_host_copy: bool, in_collective: bool, is_send: bool, eager: bool) -> int:
    if is_compute:
        return COMPUTE
    if is_host_copy:
        return HOST_COPY
    if in_collective:
        return COLLECTIVE
    if is_send:
        return EAGER_SEND if eager else SEND
    return EAGER_RECV if eager else RECV


@njit
def _lay_out(
    tasks: Records,
    streams: Records,
    duration: Ints,
    launch: Ints,
    host: Ints,
    stream: Ints,
    partner: Ints,
    collective: Ints,
    is_compute: Bools,
    is_host_copy: Bools,
    is_send: Bools,
    eager: Bools,
) -> None:
    """Gather what is known of a task in its record, and link the tasks of a stream in dispatch order."""
    last = np.full(len(streams), PENDING)
    streams["first"][:] = PENDING
    for task in range(len(tasks)):
        on = stream[task]
        tasks[task].duration = duration[task]
        tasks[task].launch = launch[task]
        tasks[task].host = host[task]
        tasks[task].stream = on
        tasks[task].other = max(partner[task], collective[task])
        tasks[task].kind = _kind(
            is_compute[task], is_host_copy[task], collective[task] != PENDING, is_send[task], eager[task]
        )
        tasks[task].kept = PENDING
        tasks[task].following = PENDING
        if last[on] == PENDING:
            streams[on].first = task
        else:
            tasks[last[on]].following = task
        last[on] = task
    for on in range(len(streams)):
        streams[on].task = streams[on].first


@bare
def forget_step(tasks: Records, times: Ints, durations: Ints, step: int) -> None:
    """Let nothing have happened yet in a step, whose tasks take `durations` (empty: as they took before)."""
    offset = step * len(tasks)
    for task in range(len(durations)):
        tasks[task].duration = durations[task]
    for task in range(len(tasks)):
        times[DISPATCH, offset + task] = PENDING
        times[READY, offset + task] = PENDING
        times[END, offset + task] = PENDING


@bare
def launch(
    tasks: Records,
    times: Ints,
    hosts: Records,
    device: int,
    last_offset: int,
    host_starts: Ints,
    host_waits: Ints,
) -> None:
    """Let the host of a device launch its tasks until it has to await the end of one that is not known."""
    task, offset, now = hosts[device].task, hosts[device].offset, hosts[device].free
    first, last = hosts[device].first, hosts[device].last
    hosts[device].awaited = PENDING
    while offset <= last_offset:
        while task < last:
            for entry in range(host_starts[task], host_starts[task + 1]):
                wait = offset + host_waits[entry]
                if wait < 0:
                    continue
                if times[END, wait] == PENDING:
                    hosts[device].awaited = wait
                    hosts[device].task, hosts[device].offset, hosts[device].free = task, offset, now
                    return
                now = host_goes_on_ns(now, times[END, wait])
            now = dispatch_ns(now, tasks[task].host)
            times[DISPATCH, offset + task] = now
            task += 1
        task = first
        offset += len(tasks)
        if first == last:
            break
    hosts[device].task, hosts[device].offset, hosts[device].free = task, offset, now


@bare
def _take_up(todo: Ints, stream: int) -> None:
    """Put a stream on the worklist, whose length is its last entry."""
    todo[todo[-1]] = stream
    todo[-1] += 1


@bare
def _has_waited(
    tasks: Records,
    times: Ints,
    streams: Records,
    stream: int,
    wait_starts: Ints,
    waits: Ints,
    previous_starts: Ints,
    previous_waits: Ints,
) -> bool:
    """Go on with the waits of the head of a stream; at one that is not done, leave the stream with it."""
    task, offset = streams[stream].task, streams[stream].offset
    here = wait_starts[task + 1] - wait_starts[task]
    count = here
    if offset > 0:
        count += previous_starts[task + 1] - previous_starts[task]
    latest = streams[stream].waits_done
    for number in range(streams[stream].waited, count):
        if number < here:
            wait = waits[wait_starts[task] + number]
            end = times[END, offset + wait]
        else:
            wait = previous_waits[previous_starts[task] + number - here]
            end = times[END, offset - len(tasks) + wait]
        if end == PENDING:
            streams[stream].waited = number
            streams[stream].waits_done = latest
            streams[stream].next_kept = tasks[wait].kept
            tasks[wait].kept = stream
            return False
        latest = max(latest, end)
    streams[stream].waits_done = latest
    return True


@bare
def _begin(
    tasks: Records,
    times: Ints,
    todo: Ints,
    task: int,
    offset: int,
    ready: int,
    groups: Records,
    members: Ints,
) -> None:
    """Let a task, whose stream and waits are ready, run or join; when it ends may depend on others."""
    kind, duration, dispatch = tasks[task].kind, tasks[task].duration, times[DISPATCH, offset + task]
    times[READY, offset + task] = ready
    if kind == COMPUTE:
        start = compute_start_ns(ready, first_launch_ns(dispatch - tasks[task].host, tasks[task].launch))
        times[START, offset + task] = start
        times[END, offset + task] = compute_end_ns(start, duration, dispatch)
    elif kind == HOST_COPY:
        start = host_copy_start_ns(ready, dispatch)
        times[START, offset + task] = start
        times[END, offset + task] = wire_end_ns(start, duration)
    else:
        times[READY, offset + task] = joined_ns(ready, dispatch)
        if kind == COLLECTIVE:
            _join_collective(tasks, times, todo, task, offset, groups, members)
        else:
            _join_transfer(tasks, times, todo, task, offset)


@bare
def _join_transfer(tasks: Records, times: Ints, todo: Ints, task: int, offset: int) -> None:
    """Join; who knows of both ends says when they end: [Note: eager send], [Note: rendezvous send]."""
    kind, peer = tasks[task].kind, tasks[task].other
    if kind == EAGER_SEND:
        times[START, offset + task] = times[READY, offset + task]
        times[END, offset + task] = wire_end_ns(times[READY, offset + task], tasks[task].duration)
    if times[READY, offset + peer] == PENDING:
        return
    sends = kind in (EAGER_SEND, SEND)
    send, recv = (task, peer) if sends else (peer, task)
    sent, posted = times[READY, offset + send], times[READY, offset + recv]
    if kind in (EAGER_SEND, EAGER_RECV):
        times[START, offset + recv] = eager_recv_start_ns(sent, posted)
        times[END, offset + recv] = eager_recv_end_ns(sent, posted, tasks[send].duration)
    else:
        start = rendezvous_start_ns(sent, posted)
        for end in (send, recv):
            times[START, offset + end] = start
            times[END, offset + end] = wire_end_ns(start, tasks[send].duration)
    if kind != EAGER_RECV:
        _take_up(todo, tasks[peer].stream)


@bare
def _join_collective(
    tasks: Records, times: Ints, todo: Ints, task: int, offset: int, groups: Records, members: Ints
) -> None:
    """Join; the last member says when all of them end: [Note: additive skew]."""
    number = tasks[task].other
    first, last = groups[number].first, groups[number].last
    latest = collective_start_ns(groups[number].latest, times[READY, offset + task])
    groups[number].latest = latest
    groups[number].arrivals += 1
    if groups[number].arrivals < last - first:
        return
    groups[number].arrivals = 0
    groups[number].latest = 0
    end = wire_end_ns(latest, tasks[members[first]].duration)
    for index in range(first, last):
        member = members[index]
        times[START, offset + member] = latest
        times[END, offset + member] = end
        if member != task:
            _take_up(todo, tasks[member].stream)


@bare
def _go_on(tasks: Records, times: Ints, streams: Records, todo: Ints, stream: int) -> None:
    """Make the next task of a stream its head, and take up the streams that waited for the present one."""
    task, offset = streams[stream].task, streams[stream].offset
    streams[stream].free = times[END, offset + task]
    streams[stream].waited = 0
    streams[stream].waits_done = 0
    streams[stream].task = tasks[task].following
    if tasks[task].following == PENDING:
        streams[stream].task = streams[stream].first
        streams[stream].offset = offset + len(tasks)
    waiting = np.int64(tasks[task].kept)
    tasks[task].kept = PENDING
    while waiting != PENDING:
        _take_up(todo, waiting)
        waiting = streams[waiting].next_kept


@bare
def _take_up_launched(streams: Records, hosts: Records, device: int, todo: Ints) -> None:
    """Take up the streams of a device that waited for its host."""
    for stream in range(hosts[device].first_stream, hosts[device].last_stream):
        if streams[stream].unlaunched:
            streams[stream].unlaunched = 0
            _take_up(todo, stream)


@bare
def _run_steps(
    first_step: int,
    last_step: int,
    durations: Ints,
    tasks: Records,
    times: Ints,
    streams: Records,
    hosts: Records,
    groups: Records,
    members: Ints,
    todo: Ints,
    host_starts: Ints,
    host_waits: Ints,
    wait_starts: Ints,
    waits: Ints,
    previous_starts: Ints,
    previous_waits: Ints,
) -> int:
    """Run `first_step` to `last_step` as far as possible; see [Note: streams as a worklist]."""
    for step in range(first_step, last_step + 1):
        forget_step(tasks, times, durations, step)
    last_offset = last_step * len(tasks)
    for device in range(len(hosts)):
        launch(tasks, times, hosts, device, last_offset, host_starts, host_waits)
    todo[-1] = 0
    for stream in range(len(streams)):
        streams[stream].unlaunched = 0
        if streams[stream].task != PENDING:
            _take_up(todo, stream)
    finished = 0
    while todo[-1] > 0:
        todo[-1] -= 1
        stream = todo[todo[-1]]
        while streams[stream].offset <= last_offset:
            task, offset = streams[stream].task, streams[stream].offset
            if times[READY, offset + task] == PENDING:
                if times[DISPATCH, offset + task] == PENDING:
                    streams[stream].unlaunched = 1
                    break
                if not _has_waited(
                    tasks, times, streams, stream, wait_starts, waits, previous_starts, previous_waits
                ):
                    break
                ready = ready_ns(streams[stream].free, streams[stream].waits_done)
                _begin(tasks, times, todo, task, offset, ready, groups, members)
            if times[END, offset + task] == PENDING:
                break
            _go_on(tasks, times, streams, todo, stream)
            finished += 1
            device = streams[stream].device
            if hosts[device].awaited == offset + task:
                launch(tasks, times, hosts, device, last_offset, host_starts, host_waits)
                _take_up_launched(streams, hosts, device, todo)
    return finished


def _compiled(rules_text: str) -> tuple[Any, Any]:
    """Return `_lay_out` and `_run_steps` compiled and kept; see [Note: compiled once per machine]."""

    def lay_out(*arrays: npt.NDArray[Any]) -> None:
        len(rules_text)
        _lay_out(*arrays)

    def run_steps(first_step: int, last_step: int, *arrays: npt.NDArray[Any]) -> int:
        len(rules_text)
        ended: int = _run_steps(first_step, last_step, *arrays)
        return ended

    return kept(lay_out), kept(run_steps)


lay_out, run_steps = _compiled(text_of(rules, compiled))

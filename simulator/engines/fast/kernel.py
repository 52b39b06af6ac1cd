"""The compiled part of the fast engine: flat arrays in, times of all tasks out.

The scalar functions of `simulator.rules` are compiled unchanged, so that both engines implement the same
notes: [Note: host dispatch], [Note: run-ahead limit], [Note: blocking calls], [Note: host-bound tasks],
[Note: stream start], [Note: eager send], [Note: rendezvous send], [Note: additive skew], [Note: host copy].
Where links and devices are shared, `shared_kernel` runs instead.

[Note: streams as a worklist]  Nothing contends, so every time is a sum or a maximum of other times, and the
    order in which they are computed does not matter. A stream advances while all that its head needs is
    known. Otherwise it is kept by the one task that it waits for, or by its transfer or collective, and is
    taken up again when that is known. Every task and every wait is looked at once: the cost is linear.
[Note: traffic]  Of 10^7 tasks nothing stays in a cache, and cache lines are what takes time. So a task is
    looked at in as few passes as can be: no array of times is filled beforehand (`state` says what is in it:
    one byte, in memory that is zero by itself), and a host launches no more than `AHEAD` tasks before its
    streams run them, while they are still near. What is used together lies together.
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
States = npt.NDArray[np.int8]
Keepers = npt.NDArray[np.int32]
"""By task, one more than the first of the streams that wait for it; 0: none does."""
AHEAD = 1024
"""Tasks that a host launches at once; see [Note: traffic]."""

PENDING = -1
COMPUTE, HOST_COPY, COLLECTIVE, SEND, RECV, EAGER_SEND, EAGER_RECV = range(7)
DISPATCH, READY, START, END = range(4)
"""Columns of `times`, int64 [instances, 4], two in a cache line. An *instance* is a task in a step:
step * num_tasks + task."""
JOINED, ENDED = 1, 2
"""What has happened to an instance, in `state`: 0: nothing yet; READY is known; END is known, too."""

TASK = np.dtype(
    [
        ("stream", np.int32),
        ("other", np.int32),  # the other end of a transfer, or the number of a collective
        ("following", np.int32),  # the next task on the same stream, or PENDING
        ("kind", np.int32),
    ]
)
"""What a task is, four in a cache line; what it takes is read where it is needed: [Note: traffic]."""
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
    stream: Ints,
    partner: Ints,
    collective: Ints,
    is_compute: Bools,
    is_host_copy: Bools,
    is_send: Bools,
    eager: Bools,
) -> None:
    """Gather what a task is in its record, and link the tasks of a stream in dispatch order."""
    last = np.full(len(streams), PENDING)
    streams["first"][:] = PENDING
    for task in range(len(tasks)):
        on = stream[task]
        tasks[task].stream = on
        tasks[task].other = max(partner[task], collective[task])
        tasks[task].kind = _kind(
            is_compute[task], is_host_copy[task], collective[task] != PENDING, is_send[task], eager[task]
        )
        tasks[task].following = PENDING
        if last[on] == PENDING:
            streams[on].first = task
        else:
            tasks[last[on]].following = task
        last[on] = task
    for on in range(len(streams)):
        streams[on].task = streams[on].first


@bare
def launch(
    times: Ints,
    state: States,
    hosts: Records,
    device: int,
    num_tasks: int,
    last_offset: int,
    host_ns: Ints,
    host_starts: Ints,
    host_waits: Ints,
) -> None:
    """Let the host of a device launch some tasks, or until it has to await an end that is not known."""
    task, offset, now = hosts[device].task, hosts[device].offset, hosts[device].free
    first, last = hosts[device].first, hosts[device].last
    left = AHEAD
    hosts[device].awaited = PENDING
    while left > 0 and offset <= last_offset and first < last:
        for entry in range(host_starts[task], host_starts[task + 1]):
            wait = offset + host_waits[entry]
            if wait < 0:
                continue
            if state[wait] != ENDED:
                hosts[device].awaited = wait
                left = 0
                break
            now = host_goes_on_ns(now, times[wait, END])
        if hosts[device].awaited != PENDING:
            break
        now = dispatch_ns(now, host_ns[task])
        times[offset + task, DISPATCH] = now
        left -= 1
        task += 1
        if task == last:
            task = first
            offset += num_tasks
    hosts[device].task, hosts[device].offset, hosts[device].free = task, offset, now


@bare
def is_launched(
    times: Ints,
    state: States,
    streams: Records,
    hosts: Records,
    stream: int,
    num_tasks: int,
    last_offset: int,
    host_ns: Ints,
    host_starts: Ints,
    host_waits: Ints,
) -> bool:
    """Tell whether the head of a stream is launched, once its host has gone as far as it can for that."""
    instance, device = streams[stream].offset + streams[stream].task, streams[stream].device
    while hosts[device].offset + hosts[device].task <= instance:
        if hosts[device].awaited != PENDING:
            streams[stream].unlaunched = 1
            return False
        launch(times, state, hosts, device, num_tasks, last_offset, host_ns, host_starts, host_waits)
    return True


@bare
def _take_up(todo: Ints, stream: int) -> None:
    """Put a stream on the worklist, whose length is its last entry."""
    todo[todo[-1]] = stream
    todo[-1] += 1


@bare
def _has_waited(
    times: Ints,
    state: States,
    streams: Records,
    kept_by: Keepers,
    stream: int,
    num_tasks: int,
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
            instance = offset + wait
        else:
            wait = previous_waits[previous_starts[task] + number - here]
            instance = offset - num_tasks + wait
        if state[instance] != ENDED:
            streams[stream].waited = number
            streams[stream].waits_done = latest
            streams[stream].next_kept = np.int64(kept_by[wait]) + PENDING
            kept_by[wait] = stream - PENDING
            return False
        latest = max(latest, times[instance, END])
    streams[stream].waits_done = latest
    return True


@bare
def _begin(
    tasks: Records,
    times: Ints,
    state: States,
    todo: Ints,
    task: int,
    offset: int,
    ready: int,
    durations: Ints,
    launch_ns: Ints,
    host_ns: Ints,
    groups: Records,
    members: Ints,
) -> None:
    """Let a task, whose stream and waits are ready, run or join; when it ends may depend on others."""
    kind, instance = tasks[task].kind, offset + task
    dispatch = times[instance, DISPATCH]
    times[instance, READY] = ready
    state[instance] = ENDED
    if kind == COMPUTE:
        start = compute_start_ns(ready, first_launch_ns(dispatch - host_ns[task], launch_ns[task]))
        times[instance, START] = start
        times[instance, END] = compute_end_ns(start, durations[task], dispatch)
    elif kind == HOST_COPY:
        start = host_copy_start_ns(ready, dispatch)
        times[instance, START] = start
        times[instance, END] = wire_end_ns(start, durations[task])
    else:
        times[instance, READY] = joined_ns(ready, dispatch)
        state[instance] = JOINED
        if kind == COLLECTIVE:
            _join_collective(tasks, times, state, todo, task, offset, durations, groups, members)
        else:
            _join_transfer(tasks, times, state, todo, task, offset, durations)


@bare
def _join_transfer(
    tasks: Records, times: Ints, state: States, todo: Ints, task: int, offset: int, durations: Ints
) -> None:
    """Join; who knows of both ends says when they end: [Note: eager send], [Note: rendezvous send]."""
    kind, peer = tasks[task].kind, np.int64(tasks[task].other)
    if kind == EAGER_SEND:
        times[offset + task, START] = times[offset + task, READY]
        times[offset + task, END] = wire_end_ns(times[offset + task, READY], durations[task])
        state[offset + task] = ENDED
    if state[offset + peer] == 0:
        return
    sends = kind in (EAGER_SEND, SEND)
    send, recv = (task, peer) if sends else (peer, task)
    sent, posted = times[offset + send, READY], times[offset + recv, READY]
    if kind in (EAGER_SEND, EAGER_RECV):
        times[offset + recv, START] = eager_recv_start_ns(sent, posted)
        times[offset + recv, END] = eager_recv_end_ns(sent, posted, durations[send])
        state[offset + recv] = ENDED
    else:
        start = rendezvous_start_ns(sent, posted)
        for end in (send, recv):
            times[offset + end, START] = start
            times[offset + end, END] = wire_end_ns(start, durations[send])
            state[offset + end] = ENDED
    if kind != EAGER_RECV:
        _take_up(todo, tasks[peer].stream)


@bare
def _join_collective(
    tasks: Records,
    times: Ints,
    state: States,
    todo: Ints,
    task: int,
    offset: int,
    durations: Ints,
    groups: Records,
    members: Ints,
) -> None:
    """Join; the last member says when all of them end: [Note: additive skew]."""
    number = tasks[task].other
    first, last = groups[number].first, groups[number].last
    latest = collective_start_ns(groups[number].latest, times[offset + task, READY])
    groups[number].latest = latest
    groups[number].arrivals += 1
    if groups[number].arrivals < last - first:
        return
    groups[number].arrivals = 0
    groups[number].latest = 0
    end = wire_end_ns(latest, durations[members[first]])
    for index in range(first, last):
        member = members[index]
        times[offset + member, START] = latest
        times[offset + member, END] = end
        state[offset + member] = ENDED
        if member != task:
            _take_up(todo, tasks[member].stream)


@bare
def _go_on(tasks: Records, times: Ints, streams: Records, kept_by: Keepers, todo: Ints, stream: int) -> None:
    """Make the next task of a stream its head, and take up the streams that waited for the present one."""
    task, offset = streams[stream].task, streams[stream].offset
    streams[stream].free = times[offset + task, END]
    streams[stream].waited = 0
    streams[stream].waits_done = 0
    streams[stream].task = tasks[task].following
    if tasks[task].following == PENDING:
        streams[stream].task = streams[stream].first
        streams[stream].offset = offset + len(tasks)
    waiting = np.int64(kept_by[task]) + PENDING
    if waiting != PENDING:
        kept_by[task] = 0
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
    last_step: int,
    durations: Ints,
    tasks: Records,
    times: Ints,
    state: States,
    streams: Records,
    hosts: Records,
    groups: Records,
    members: Ints,
    launch_ns: Ints,
    host_ns: Ints,
    host_starts: Ints,
    host_waits: Ints,
    wait_starts: Ints,
    waits: Ints,
    previous_starts: Ints,
    previous_waits: Ints,
    kept_by: Keepers,
    todo: Ints,
) -> int:
    """Run to the end of `last_step` as far as possible; see [Note: streams as a worklist]."""
    last_offset = last_step * len(tasks)
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
            if state[offset + task] == 0:
                if not is_launched(
                    times, state, streams, hosts, stream, len(tasks), last_offset, host_ns, host_starts,
                    host_waits,
                ):  # fmt: skip
                    break
                if not _has_waited(
                    times, state, streams, kept_by, stream, len(tasks), wait_starts, waits, previous_starts,
                    previous_waits,
                ):  # fmt: skip
                    break
                ready = ready_ns(streams[stream].free, streams[stream].waits_done)
                _begin(
                    tasks, times, state, todo, task, offset, ready, durations, launch_ns, host_ns, groups,
                    members,
                )  # fmt: skip
            if state[offset + task] != ENDED:
                break
            _go_on(tasks, times, streams, kept_by, todo, stream)
            finished += 1
            device = streams[stream].device
            if hosts[device].awaited == offset + task:
                hosts[device].awaited = PENDING
                _take_up_launched(streams, hosts, device, todo)
    return finished


def _compiled(rules_text: str) -> tuple[Any, Any]:
    """Return `_lay_out` and `_run_steps` compiled and kept; see [Note: compiled once per machine]."""

    def lay_out(*arrays: npt.NDArray[Any]) -> None:
        len(rules_text)
        _lay_out(*arrays)

    def run_steps(last_step: int, *arrays: npt.NDArray[Any]) -> int:
        len(rules_text)
        ended: int = _run_steps(last_step, *arrays)
        return ended

    return kept(lay_out), kept(run_steps)


lay_out, run_steps = _compiled(text_of(rules, compiled))

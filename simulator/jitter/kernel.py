"""The compiled part of unfolded runs: one template per device plan, and 16 bytes per unit and task.

The functions of `simulator.rules` and `simulator.jitter.draws` are compiled unchanged; the notes of the fast
engine hold here, too: [Note: streams as a worklist], [Note: arrays as arguments]. A step is worked out to its
end before the next begins, since no time depends on a later step.

[Note: two words per task]  Of every task of a unit there are two int64. `joined` is when it was ready (or
    took part); before that CODED - the time at which the host had launched it, or PENDING. `end` is when it
    ended; before that CODED - the first of the streams that wait for it, or PENDING. What later steps need
    of a step is copied aside before its words are used again.
[Note: blame]  Who arrives last at a collective, or at a transfer that needs both ends, is blamed for the
    time that the others have waited; several that arrive last share it. Both are per rank of a unit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

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
from simulator.jitter import draws

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

PENDING = -1
CODED = -2
"""From here down, a word is CODED - what it stands for; see [Note: two words per task]."""
COMPUTE, HOST_COPY, COLLECTIVE, SEND, RECV, EAGER_SEND, EAGER_RECV = range(7)
DISPATCH, READY, START, END = range(4)
"""Rows of `recorded`, int64 [4, recorded instances]."""

DURATION, LAUNCH, HOST, KEY, COUNTER, ON, OTHER, WHERE, FOLLOWING, KIND = range(10)
"""Columns of `tasks`, int64 [tasks, 10]: a task of a device plan, which all its units share.

duration: alone and undisturbed; of a meeting, that of the task that drives it
launch, host: as in `Workload`
key: what it draws by: its number, that of its send, or the number of tasks + its collective
counter: of a collective: where the arrivals at its first set are counted
on: its stream, among those of its device plan
other: the other end of a transfer, or the number of a collective
where: the device plan of the other end, or the group of a collective
following: the next task on the same stream, or PENDING
"""
BASE, RECORD, ASIDE, FIRST, LAST, FIRST_STREAM, LAST_STREAM = range(7)
CHANCE, HICCUP, DRAW, NOISY, RECORDED, NEXT, HOST_FREE, AWAITED = range(7, 15)
"""Columns of `units`, int64 [units, 15].

base: number of a task + base = its place in `joined` and `end`
record: number of a task + record = its place in `recorded`, if it is recorded
aside: where its times of the step before begin
first, last, first_stream, last_stream: its tasks in the template, and its streams
chance, hiccup, draw, noisy: as in `Disturbance`
next: the task that its host launches next, host_free: when it has launched the one before, awaited: the
task whose end it awaits, or PENDING
"""
UNIT_COLUMNS = 15
TASK_COLUMNS = 10
STREAM_COLUMNS = 8
HEAD, FREE, WAITED, WAITS_DONE, NEXT_KEPT, HEAD_FIRST, UNIT, UNLAUNCHED = range(8)
"""Columns of `streams`, int64 [streams, 8].

head: the task that comes next, or PENDING; head_first: the same at the beginning of a step
free: when the task before its head ended
waited: how many waits of its head are done, waits_done: when the last of these was
next_kept: the next stream that waits for the same task, or PENDING
unlaunched: whether it waits for the host to launch its head
"""

_mixed = bare(draws.mixed)
_with_draw = bare(draws.with_draw)
_with_task = bare(draws.with_task)
_table_row = bare(draws.table_row)
_for_chance = bare(draws.for_chance)
_chance = bare(draws.chance)
_longer_ns = bare(draws.longer_ns)


@bare
def _longer(duration: Any, factor: float) -> Any:
    """Return a disturbed duration; without a disturbance the very same."""
    return duration if factor == 1.0 else np.int64(_longer_ns(duration, factor))


@bare
def _bits(step_key: Any, draw: Any, key: Any) -> Any:
    return _mixed(_with_task(_mixed(_with_draw(step_key, draw)), np.uint64(key)))


@bare
def _compute_ns(
    tasks: Ints,
    units: Ints,
    unit: int,
    task: int,
    step_key: int,
    compute_factor: Floats,
    compute_noise: Floats,
) -> Any:
    """Return how long a computation takes on a unit in a step."""
    duration, factor = tasks[task, DURATION], compute_factor[unit]
    if not units[unit, NOISY] and not units[unit, CHANCE]:
        return _longer(duration, factor)
    bits = _bits(step_key, np.uint64(units[unit, DRAW]), tasks[task, KEY])
    if units[unit, NOISY]:
        factor = factor * compute_noise[_table_row(bits)]
    longer = _longer(duration, factor)
    if np.int64(_chance(_mixed(_for_chance(bits)))) < units[unit, CHANCE]:
        longer += units[unit, HICCUP]
    return longer


@bare
def _wire_ns(duration: Any, factor: float, step_key: Any, draw: Any, key: Any, noise: Floats) -> Any:
    """Return how long communication takes in a step."""
    if len(noise):
        factor = factor * noise[_table_row(_bits(step_key, draw, key))]
    return _longer(duration, factor)


@bare
def _take_up(todo: Ints, stream: int) -> None:
    """Put a stream on the worklist, whose length is its last entry."""
    todo[todo[-1]] = stream
    todo[-1] += 1


@bare
def _known(end: Ints, instance: int) -> bool:
    return bool(end[instance] >= 0)


@bare
def _keep(end: Ints, streams: Ints, stream: int, instance: int) -> None:
    """Leave a stream with an instance that has not ended; see [Note: two words per task]."""
    streams[stream, NEXT_KEPT] = CODED - end[instance] if end[instance] <= CODED else PENDING
    end[instance] = CODED - stream


@bare
def _ends(end: Ints, streams: Ints, todo: Ints, instance: int, time: int) -> None:
    """Let an instance end, and take up the streams that wait for it."""
    waiting = CODED - end[instance] if end[instance] <= CODED else PENDING
    end[instance] = time
    while waiting != PENDING:
        _take_up(todo, waiting)
        waiting = streams[waiting, NEXT_KEPT]


@bare
def _launch(
    tasks: Ints,
    units: Ints,
    streams: Ints,
    joined: Ints,
    end: Ints,
    recorded: Ints,
    aside: Ints,
    todo: Ints,
    unit: int,
    first_step: bool,
    host_starts: Ints,
    host_waits: Ints,
) -> None:
    """Let the host of a unit launch tasks until it has to await the end of one that is not known."""
    now, base, record = units[unit, HOST_FREE], units[unit, BASE], units[unit, RECORD]
    units[unit, AWAITED] = PENDING
    task = units[unit, NEXT]
    while task < units[unit, LAST] and units[unit, AWAITED] == PENDING:
        for entry in range(host_starts[task], host_starts[task + 1]):
            wait = host_waits[entry]
            if wait >= 0:
                if not _known(end, base + wait):
                    units[unit, AWAITED] = wait
                    break
                now = host_goes_on_ns(now, end[base + wait])
            elif not first_step:
                now = host_goes_on_ns(now, aside[units[unit, ASIDE] - 1 - wait])
        if units[unit, AWAITED] != PENDING:
            break
        now = dispatch_ns(now, tasks[task, HOST])
        joined[base + task] = CODED - now
        if units[unit, RECORDED]:
            recorded[DISPATCH, record + task] = now
        on = units[unit, FIRST_STREAM] + tasks[task, ON]
        if streams[on, UNLAUNCHED] and streams[on, HEAD] == task:
            streams[on, UNLAUNCHED] = 0
            _take_up(todo, on)
        task += 1
    units[unit, NEXT], units[unit, HOST_FREE] = task, now


@bare
def _has_waited(
    units: Ints,
    streams: Ints,
    end: Ints,
    aside: Ints,
    unit: int,
    stream: int,
    first_step: bool,
    wait_starts: Ints,
    waits: Ints,
    previous_starts: Ints,
    previous_waits: Ints,
) -> bool:
    """Go on with the waits of the head of a stream; at one that is not done, leave the stream with it."""
    task, base, latest = streams[stream, HEAD], units[unit, BASE], streams[stream, WAITS_DONE]
    first = wait_starts[task]
    for number in range(streams[stream, WAITED], wait_starts[task + 1] - first):
        instance = base + waits[first + number]
        if not _known(end, instance):
            streams[stream, WAITED], streams[stream, WAITS_DONE] = number, latest
            _keep(end, streams, stream, instance)
            return False
        latest = max(latest, end[instance])
    if not first_step:
        for entry in range(previous_starts[task], previous_starts[task + 1]):
            latest = max(latest, aside[units[unit, ASIDE] + previous_waits[entry]])
    streams[stream, WAITED], streams[stream, WAITS_DONE] = wait_starts[task + 1] - first, latest
    return True


@bare
def _record(units: Ints, recorded: Ints, unit: int, task: int, start: int, time: int) -> None:
    if units[unit, RECORDED]:
        recorded[START, units[unit, RECORD] + task] = start
        recorded[END, units[unit, RECORD] + task] = time


@bare
def _join_transfer(
    tasks: Ints,
    units: Ints,
    streams: Ints,
    joined: Ints,
    end: Ints,
    recorded: Ints,
    todo: Ints,
    unit: int,
    task: int,
    step_key: int,
    noise: Floats,
    peer: Ints,
    peer_factor: Floats,
    waited: Ints,
    caused: Ints,
) -> None:
    """Join; who knows of both ends says when they end: [Note: eager send], [Note: rendezvous send]."""
    kind, there, peer_task = tasks[task, KIND], tasks[task, WHERE], tasks[task, OTHER]
    other = peer[unit, there]
    mine, theirs = units[unit, BASE] + task, units[other, BASE] + peer_task
    sends = kind in (EAGER_SEND, SEND)
    from_unit = unit if sends else other
    met = joined[theirs] >= 0
    if not met and kind != EAGER_SEND:
        return
    duration = _wire_ns(
        tasks[task, DURATION],
        peer_factor[unit, there],
        step_key,
        np.uint64(units[from_unit, DRAW]),
        tasks[task, KEY],
        noise,
    )
    if kind == EAGER_SEND:
        time = wire_end_ns(joined[mine], duration)
        _record(units, recorded, unit, task, joined[mine], time)
        _ends(end, streams, todo, mine, time)
    if not met:
        return
    sent, posted = (joined[mine], joined[theirs]) if sends else (joined[theirs], joined[mine])
    to_unit, recv = (other, peer_task) if sends else (unit, task)
    if kind in (EAGER_SEND, EAGER_RECV):
        start = eager_recv_start_ns(sent, posted)
        time = eager_recv_end_ns(sent, posted, duration)
    else:
        start = rendezvous_start_ns(sent, posted)
        time = wire_end_ns(start, duration)
        send = task if sends else peer_task
        _record(units, recorded, from_unit, send, start, time)
        _ends(end, streams, todo, units[from_unit, BASE] + send, time)
        waited[from_unit] += start - sent
        caused[to_unit] += start - sent
    _record(units, recorded, to_unit, recv, start, time)
    _ends(end, streams, todo, units[to_unit, BASE] + recv, time)
    waited[to_unit] += start - posted
    caused[from_unit] += start - posted
    if kind != EAGER_RECV:
        _take_up(todo, units[other, FIRST_STREAM] + tasks[peer_task, ON])


@bare
def _join_collective(
    tasks: Ints,
    units: Ints,
    streams: Ints,
    joined: Ints,
    end: Ints,
    recorded: Ints,
    todo: Ints,
    unit: int,
    task: int,
    step_key: int,
    noise: Floats,
    counters: Ints,
    group_starts: Ints,
    group_tasks: Ints,
    set_of: Ints,
    set_starts: Ints,
    set_factor: Floats,
    set_draw: Ints,
    member_starts: Ints,
    member: Ints,
    member_place: Ints,
    member_ranks: Ints,
    waited: Ints,
    caused: Ints,
) -> None:
    """Join; the last member says when all of them end: [Note: additive skew]."""
    group = tasks[task, WHERE]
    number = set_of[group, unit]
    first, last = member_starts[number], member_starts[number + 1]
    counter = tasks[task, COUNTER] + number - set_starts[group]
    counters[counter] += 1
    if counters[counter] < last - first:
        return
    counters[counter] = 0
    first_task = group_starts[tasks[task, OTHER]]
    latest = 0
    for index in range(first, last):
        instance = units[member[index], BASE] + group_tasks[first_task + member_place[index]]
        latest = collective_start_ns(latest, joined[instance])
    draw = np.uint64(set_draw[number])
    duration = _wire_ns(tasks[task, DURATION], set_factor[number], step_key, draw, tasks[task, KEY], noise)
    time = wire_end_ns(latest, duration)
    in_vain, late = 0, 0
    for index in range(first, last):
        here, its = member[index], group_tasks[first_task + member_place[index]]
        instance = units[here, BASE] + its
        wait = latest - joined[instance]
        waited[here] += wait
        in_vain += wait * member_ranks[index]
        late += member_ranks[index] if wait == 0 else 0
        _record(units, recorded, here, its, latest, time)
        _ends(end, streams, todo, instance, time)
        if here != unit:
            _take_up(todo, units[here, FIRST_STREAM] + tasks[its, ON])
    if in_vain > 0:
        for index in range(first, last):
            here = member[index]
            if joined[units[here, BASE] + group_tasks[first_task + member_place[index]]] == latest:
                caused[here] += in_vain // late


@bare
def _begin_step(units: Ints, streams: Ints, joined: Ints, end: Ints, todo: Ints) -> None:
    """Let nothing have happened yet in a step."""
    joined[:] = PENDING
    end[:] = PENDING
    todo[-1] = 0
    for unit in range(len(units)):
        units[unit, NEXT] = units[unit, FIRST]
    for stream in range(len(streams)):
        streams[stream, HEAD] = streams[stream, HEAD_FIRST]
        streams[stream, WAITED] = 0
        streams[stream, WAITS_DONE] = 0
        streams[stream, UNLAUNCHED] = 0


@bare
def _run_step(
    first_step: bool,
    step_key: int,
    tasks: Ints,
    units: Ints,
    streams: Ints,
    joined: Ints,
    end: Ints,
    recorded: Ints,
    aside: Ints,
    todo: Ints,
    waited: Ints,
    caused: Ints,
    compute_factor: Floats,
    compute_noise: Floats,
    noise: Floats,
    wait_starts: Ints,
    waits: Ints,
    previous_starts: Ints,
    previous_waits: Ints,
    host_starts: Ints,
    host_waits: Ints,
    peer: Ints,
    peer_factor: Floats,
    counters: Ints,
    group_starts: Ints,
    group_tasks: Ints,
    set_of: Ints,
    set_starts: Ints,
    set_factor: Floats,
    set_draw: Ints,
    member_starts: Ints,
    member: Ints,
    member_place: Ints,
    member_ranks: Ints,
) -> int:
    """Run a step as far as possible, and return how many instances have ended."""
    _begin_step(units, streams, joined, end, todo)
    for unit in range(len(units)):
        _launch(
            tasks,
            units,
            streams,
            joined,
            end,
            recorded,
            aside,
            todo,
            unit,
            first_step,
            host_starts,
            host_waits,
        )
    for stream in range(len(streams)):
        if streams[stream, HEAD] != PENDING:
            _take_up(todo, stream)
    finished = 0
    while todo[-1] > 0:
        todo[-1] -= 1
        stream = todo[todo[-1]]
        unit = streams[stream, UNIT]
        base = units[unit, BASE]
        while streams[stream, HEAD] != PENDING:
            task = streams[stream, HEAD]
            instance = base + task
            if joined[instance] < 0:
                if joined[instance] == PENDING:
                    streams[stream, UNLAUNCHED] = 1
                    break
                if not _has_waited(
                    units,
                    streams,
                    end,
                    aside,
                    unit,
                    stream,
                    first_step,
                    wait_starts,
                    waits,
                    previous_starts,
                    previous_waits,
                ):
                    break
                ready = ready_ns(streams[stream, FREE], streams[stream, WAITS_DONE])
                dispatch = CODED - joined[instance]
                kind = tasks[task, KIND]
                if kind == COMPUTE:
                    joined[instance] = ready
                    first_launch = first_launch_ns(dispatch - tasks[task, HOST], tasks[task, LAUNCH])
                    start = compute_start_ns(ready, first_launch)
                    duration = _compute_ns(tasks, units, unit, task, step_key, compute_factor, compute_noise)
                    time = compute_end_ns(start, duration, dispatch)
                    _record(units, recorded, unit, task, start, time)
                    _ends(end, streams, todo, instance, time)
                elif kind == HOST_COPY:
                    joined[instance] = ready
                    start = host_copy_start_ns(ready, dispatch)
                    time = wire_end_ns(
                        start,
                        _wire_ns(
                            tasks[task, DURATION],
                            1.0,
                            step_key,
                            np.uint64(units[unit, DRAW]),
                            tasks[task, KEY],
                            noise,
                        ),
                    )
                    _record(units, recorded, unit, task, start, time)
                    _ends(end, streams, todo, instance, time)
                else:
                    joined[instance] = joined_ns(ready, dispatch)
                    if kind == COLLECTIVE:
                        _join_collective(
                            tasks,
                            units,
                            streams,
                            joined,
                            end,
                            recorded,
                            todo,
                            unit,
                            task,
                            step_key,
                            noise,
                            counters,
                            group_starts,
                            group_tasks,
                            set_of,
                            set_starts,
                            set_factor,
                            set_draw,
                            member_starts,
                            member,
                            member_place,
                            member_ranks,
                            waited,
                            caused,
                        )
                    else:
                        _join_transfer(
                            tasks,
                            units,
                            streams,
                            joined,
                            end,
                            recorded,
                            todo,
                            unit,
                            task,
                            step_key,
                            noise,
                            peer,
                            peer_factor,
                            waited,
                            caused,
                        )
                if units[unit, RECORDED]:
                    recorded[READY, units[unit, RECORD] + task] = joined[instance]
            if not _known(end, instance):
                break
            streams[stream, FREE] = end[instance]
            streams[stream, WAITED] = 0
            streams[stream, WAITS_DONE] = 0
            streams[stream, HEAD] = tasks[task, FOLLOWING]
            finished += 1
            if units[unit, AWAITED] == task:
                _launch(
                    tasks,
                    units,
                    streams,
                    joined,
                    end,
                    recorded,
                    aside,
                    todo,
                    unit,
                    first_step,
                    host_starts,
                    host_waits,
                )
    return finished


def _compiled(texts: str) -> Any:
    """Return `_run_step` compiled and kept; see [Note: compiled once per machine]."""

    def run_step(first_step: bool, step_key: int, *arrays: npt.NDArray[Any]) -> int:
        len(texts)
        ended: int = _run_step(first_step, step_key, *arrays)
        return ended

    return kept(run_step)


run_step = _compiled(text_of(rules, draws, compiled))

"""The compiled part of the fast engine where links, processors and memory bandwidth are shared.

It implements every note of `simulator.rules`; by [Note: flows] it goes from ns to ns, in order of time.

[Note: slots]  A flow lives in the slot of the stream of the task that drives it: the sender, the first
    member of a collective, a computation itself. A stream runs one task at a time, so that a slot holds one
    flow, and a heap of slots by the time that each is due next is all the time that there is.
[Note: what has to settle]  At the end of a ns, links whose flows have changed are looked at, and through
    links that are wanted by more than they have (only these slow anyone), their neighbours. The reference
    engine looks at all flows; [Note: sums from scratch] makes both the same to the last bit.
[Note: arrays as arguments] is as in `kernel`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from simulator import compiled, rules
from simulator.compiled import (
    bare,
    compute_speed,
    compute_start_ns,
    first_launch_ns,
    flow_left,
    flow_ns,
    host_copy_start_ns,
    joined_ns,
    kept,
    latency_ns,
    memory_share,
    processor_share,
    ready_ns,
    text_of,
)
from simulator.engines.fast import kernel
from simulator.engines.fast.kernel import (
    COLLECTIVE,
    COMPUTE,
    DISPATCH,
    EAGER_RECV,
    EAGER_SEND,
    END,
    ENDED,
    HOST_COPY,
    JOINED,
    PENDING,
    READY,
    SEND,
    START,
    Ints,
    Keepers,
    Records,
    States,
    is_launched,
)
from simulator.engines.fast.shared_layout import (
    COMPUTING,
    IDLE,
    JOINING,
    LATENCY,
    LAUNCHING,
    MOVING,
    STARTING,
)
from simulator.sharing import fair

Floats = npt.NDArray[np.float64]
_fair_speeds = bare(fair.fair_speeds)


# --- the heap of slots -------------------------------------------------------------------------------------


@bare
def _rise(heap: Ints, slots: Records, place: int) -> None:
    slot = heap[place]
    due = slots[slot].due
    while place > 0:
        above = (place - 1) // 2
        other = heap[above]
        if slots[other].due <= due:
            break
        heap[place] = other
        slots[other].place = place
        place = above
    heap[place] = slot
    slots[slot].place = place


@bare
def _sink(heap: Ints, slots: Records, place: int) -> None:
    count = heap[-1]
    slot = heap[place]
    due = slots[slot].due
    while True:
        below = 2 * place + 1
        if below >= count:
            break
        if below + 1 < count and slots[heap[below + 1]].due < slots[heap[below]].due:
            below += 1
        other = heap[below]
        if slots[other].due >= due:
            break
        heap[place] = other
        slots[other].place = place
        place = below
    heap[place] = slot
    slots[slot].place = place


@bare
def _time(heap: Ints, slots: Records, slot: int, due: int) -> None:
    """Let a slot be due at a time, whether or not it was due before."""
    slots[slot].due = due
    if slots[slot].place == PENDING:
        heap[heap[-1]] = slot
        slots[slot].place = heap[-1]
        heap[-1] += 1
    _rise(heap, slots, slots[slot].place)
    _sink(heap, slots, slots[slot].place)


@bare
def _take_first(heap: Ints, slots: Records) -> int:
    """Remove the slot that is due first."""
    slot = heap[0]
    slots[slot].place = PENDING
    heap[-1] -= 1
    if heap[-1] > 0:
        heap[0] = heap[heap[-1]]
        slots[heap[0]].place = 0
        _sink(heap, slots, 0)
    return slot


# --- lists whose length is their last entry ----------------------------------------------------------------


@bare
def _push(found: Ints, value: int) -> None:
    found[found[-1]] = value
    found[-1] += 1


@bare
def _unsettle_link(links: Records, unsettled_links: Ints, link: int) -> None:
    if not links[link].unsettled:
        links[link].unsettled = 1
        _push(unsettled_links, link)


@bare
def _unsettle_device(devices: Records, unsettled_devices: Ints, device: int) -> None:
    if not devices[device].unsettled:
        devices[device].unsettled = 1
        _push(unsettled_devices, device)


# --- tasks -------------------------------------------------------------------------------------------------


@bare
def _finish(
    tasks: Records, holds: Records, times: Ints, state: States, streams: Records, devices: Records,
    todo: Ints, unsettled_devices: Ints, ended: Ints, remaining: Ints, instance: int, now: int,
) -> None:  # fmt: skip
    """Let a task end now: its stream, and those that waited for it, go on."""
    task = instance % len(tasks)
    stream = np.int64(tasks[task].stream)
    times[instance, END] = now
    state[instance] = ENDED
    remaining[instance // len(tasks)] -= 1
    if holds[task].processors:
        devices[streams[stream].device].held -= holds[task].processors
        _unsettle_device(devices, unsettled_devices, streams[stream].device)
    streams[stream].free = now
    streams[stream].waited = 0
    streams[stream].waits_done = 0
    streams[stream].task = tasks[task].following
    if tasks[task].following == PENDING:
        streams[stream].task = streams[stream].first
        streams[stream].offset += len(tasks)
    _push(todo, stream)
    _push(ended, instance)


@bare
def _after_ends(
    tasks: Records, streams: Records, hosts: Records, kept_by: Keepers, todo: Ints, ended: Ints,
) -> None:  # fmt: skip
    """Take up the streams that waited for tasks that have just ended, or for a host that did."""
    while ended[-1] > 0:
        ended[-1] -= 1
        instance = ended[ended[-1]]
        device = streams[tasks[instance % len(tasks)].stream].device
        waiting = np.int64(kept_by[instance]) + PENDING
        if waiting != PENDING:
            kept_by[instance] = 0
        while waiting != PENDING:
            _push(todo, waiting)
            waiting = streams[waiting].next_kept
        if hosts[device].awaited == instance:
            hosts[device].awaited = PENDING
            for stream in range(hosts[device].first_stream, hosts[device].last_stream):
                if streams[stream].unlaunched:
                    streams[stream].unlaunched = 0
                    _push(todo, stream)


@bare
def _has_waited(
    times: Ints, state: States, streams: Records, kept_by: Keepers, stream: int, num_tasks: int,
    wait_starts: Ints, waits: Ints, previous_starts: Ints, previous_waits: Ints,
) -> bool:  # fmt: skip
    """Go on with the waits of the head of a stream; at one that is not done, leave the stream with it."""
    task, offset = streams[stream].task, streams[stream].offset
    here = wait_starts[task + 1] - wait_starts[task]
    count = here
    if offset > 0:
        count += previous_starts[task + 1] - previous_starts[task]
    latest = streams[stream].waits_done
    for number in range(streams[stream].waited, count):
        if number < here:
            wait = offset + waits[wait_starts[task] + number]
        else:
            wait = offset - num_tasks + previous_waits[previous_starts[task] + number - here]
        if state[wait] != ENDED:
            streams[stream].waited = number
            streams[stream].waits_done = latest
            streams[stream].next_kept = np.int64(kept_by[wait]) + PENDING
            kept_by[wait] = stream - PENDING
            return False
        latest = max(latest, times[wait, END])
    streams[stream].waits_done = latest
    return True


@bare
def _end_communication(
    tasks: Records, holds: Records, times: Ints, state: States, streams: Records, slots: Records,
    devices: Records, demands: Records, links: Records, link_numbers: Ints, uses: Floats,
    link_places: Ints, link_now: Floats, device_numbers: Ints, device_places: Ints, device_now: Floats,
    groups: Records, members: Ints, todo: Ints, ended: Ints, remaining: Ints, unsettled_links: Ints,
    unsettled_devices: Ints, slot: int, now: int,
) -> None:  # fmt: skip
    """Let the flow of a slot end now, on all its members."""
    instance = slots[slot].task
    task = instance % len(tasks)
    offset = instance - task
    kind = tasks[task].kind
    if slots[slot].state == MOVING:
        _load(slots, demands, links, link_numbers, uses, link_places, link_now, unsettled_links, slot, 0.0)
        flow = slots[slot].kind
        for entry in range(demands[flow].first_device, demands[flow].last_device):
            device_now[device_places[entry]] = 0.0
            _unsettle_device(devices, unsettled_devices, device_numbers[entry])
    slots[slot].state = IDLE
    if kind == COLLECTIVE:
        group = tasks[task].other
        for index in range(groups[group].first, groups[group].last):
            _finish(tasks, holds, times, state, streams, devices, todo, unsettled_devices, ended, remaining,
                    offset + members[index], now)  # fmt: skip
        return
    _finish(tasks, holds, times, state, streams, devices, todo, unsettled_devices, ended, remaining, instance,
            now)  # fmt: skip
    if kind == HOST_COPY:
        return
    peer = np.int64(tasks[task].other)
    if kind == SEND or state[offset + peer] == JOINED:
        times[offset + peer, START] = max(times[offset + peer, READY], times[instance, READY])
        _finish(tasks, holds, times, state, streams, devices, todo, unsettled_devices, ended, remaining,
                offset + peer, now)  # fmt: skip


@bare
def _load(
    slots: Records, demands: Records, links: Records, link_numbers: Ints, uses: Floats, link_places: Ints,
    link_now: Floats, unsettled_links: Ints, slot: int, factor: float,
) -> None:  # fmt: skip
    """Let a flow load its links (factor 1), or no more (0)."""
    flow = slots[slot].kind
    for entry in range(demands[flow].first, demands[flow].last):
        link_now[link_places[entry]] = factor * uses[entry]
        _unsettle_link(links, unsettled_links, link_numbers[entry])


@bare
def _enter_links(
    slots: Records, demands: Records, links: Records, link_numbers: Ints, uses: Floats, link_places: Ints,
    link_now: Floats, device_places: Ints, device_now: Floats, unsettled_links: Ints, fresh: Ints, slot: int,
    now: int,
) -> None:  # fmt: skip
    """Let bytes flow; the speed is known when this ns settles."""
    slots[slot].state = MOVING
    slots[slot].since = now
    slots[slot].speed = 0.0
    _push(fresh, slot)
    _load(slots, demands, links, link_numbers, uses, link_places, link_now, unsettled_links, slot, 1.0)
    flow = slots[slot].kind
    for entry in range(demands[flow].first_device, demands[flow].last_device):
        device_now[device_places[entry]] = demands[flow].memory


@bare
def _begin_communication(
    tasks: Records, holds: Records, slots: Records, demands: Records, durations: Ints, heap: Ints,
    instance: int, now: int,
) -> int:  # fmt: skip
    """Put a flow in the slot of who drives it; return the slot if it has no latency, or PENDING."""
    task, step = instance % len(tasks), instance // len(tasks)
    slot: int = tasks[task].stream
    duration = durations[min(step, len(durations) - 1), task]
    slots[slot].task = instance
    slots[slot].kind = holds[task].row
    latency = latency_ns(demands[holds[task].row].latency, duration)
    slots[slot].left = float(duration - latency)
    slots[slot].state = LATENCY
    if latency == 0:
        return slot
    _time(heap, slots, slot, now + latency)
    return PENDING


# --- settling ----------------------------------------------------------------------------------------------


@bare
def _set_speed(heap: Ints, slots: Records, slot: int, speed: float, now: int) -> bool:
    """Time a flow anew if its speed has changed, and tell whether it has."""
    if speed == slots[slot].speed:
        return False
    slots[slot].left = flow_left(slots[slot].left, now - slots[slot].since, slots[slot].speed)
    slots[slot].since = now
    slots[slot].speed = speed
    _time(heap, slots, slot, now + flow_ns(slots[slot].left, speed))
    return True


@bare
def _look_at(
    slots: Records,
    links: Records,
    link_slots: Ints,
    link_now: Floats,
    looked_at: Ints,
    flows: Ints,
    link: int,
) -> None:
    """Add up what a link is wanted for; put its flows among those that settle, if it concerns them."""
    if links[link].number != PENDING:
        return
    links[link].number = looked_at[-1]
    _push(looked_at, link)
    wanted = 0.0
    for index in range(links[link].first_slot, links[link].last_slot):
        wanted += link_now[index]
    links[link].tight = wanted > 1.0
    if links[link].tight or links[link].was_tight:
        for index in range(links[link].first_slot, links[link].last_slot):
            if link_now[index] > 0.0 and slots[link_slots[index]].number == PENDING:
                slots[link_slots[index]].number = flows[-1]
                _push(flows, link_slots[index])
    links[link].was_tight = links[link].tight


@bare
def _settle_links(
    slots: Records, demands: Records, links: Records, link_numbers: Ints, uses: Floats, link_slots: Ints,
    link_now: Floats, heap: Ints, fresh: Ints, flows: Ints, looked_at: Ints, unsettled_links: Ints,
    changed: Ints, found: Ints, starts: Ints, numbers: Ints, amounts: Floats, growth: Floats, used: Floats,
    grown: Floats, speeds: Floats, now: int,
) -> None:  # fmt: skip
    """Give every flow that may be concerned its speed; see [Note: what has to settle]."""
    for index in range(unsettled_links[-1]):
        link = unsettled_links[index]
        links[link].unsettled = 0
        _look_at(slots, links, link_slots, link_now, looked_at, flows, link)
    unsettled_links[-1] = 0
    for index in range(fresh[-1]):
        slot = fresh[index]
        if slots[slot].state == MOVING and slots[slot].number == PENDING:
            slots[slot].number = flows[-1]
            _push(flows, slot)
    fresh[-1] = 0
    at, entries = 0, 0
    while at < flows[-1]:
        flow = slots[flows[at]].kind
        for entry in range(demands[flow].first, demands[flow].last):
            link = link_numbers[entry]
            _look_at(slots, links, link_slots, link_now, looked_at, flows, link)
            entries += links[link].tight
        at += 1
    if entries > 0:
        _share_links(
            slots, demands, links, link_numbers, uses, heap, flows, looked_at[-1], changed, found, starts,
            numbers, amounts, growth, used, grown, speeds, now,
        )  # fmt: skip
    for index in range(flows[-1]):
        slot = flows[index]
        if slots[slot].number != PENDING:
            slots[slot].number = PENDING
            if _set_speed(heap, slots, slot, 1.0, now):
                _push(changed, slot)
    flows[-1] = 0
    for index in range(looked_at[-1]):
        links[looked_at[index]].number = PENDING
    looked_at[-1] = 0


@bare
def _sort(values: Ints) -> None:
    """Sort a short list whose length is its last entry."""
    for index in range(1, values[-1]):
        value, place = values[index], index
        while place > 0 and values[place - 1] > value:
            values[place] = values[place - 1]
            place -= 1
        values[place] = value


@bare
def _share_links(
    slots: Records, demands: Records, links: Records, link_numbers: Ints, uses: Floats, heap: Ints,
    flows: Ints, num_links: int, changed: Ints, found: Ints, starts: Ints, numbers: Ints, amounts: Floats,
    growth: Floats, used: Floats, grown: Floats, speeds: Floats, now: int,
) -> None:  # fmt: skip
    """Give their speeds to those flows that a tight link slows, from the first slot to the last."""
    _sort(flows)
    count, at = 0, 0
    starts[0] = 0
    for index in range(flows[-1]):
        flow = slots[flows[index]].kind
        before = at
        for entry in range(demands[flow].first, demands[flow].last):
            if links[link_numbers[entry]].tight:
                numbers[at] = links[link_numbers[entry]].number
                amounts[at] = uses[entry]
                at += 1
        if at > before:
            found[count] = flows[index]
            growth[count] = demands[flow].growth
            count += 1
            starts[count] = at
    _fair_speeds(
        starts[: count + 1], numbers, amounts, growth[:count], used[:num_links], grown[:num_links], speeds
    )
    for index in range(count):
        slots[found[index]].number = PENDING
        if _set_speed(heap, slots, found[index], speeds[index], now):
            _push(changed, found[index])


@bare
def _unsettle_members(
    slots: Records, demands: Records, devices: Records, device_numbers: Ints, changed: Ints,
    unsettled_devices: Ints,
) -> None:  # fmt: skip
    """Let devices settle whose memory a communication takes at a new speed."""
    for index in range(changed[-1]):
        flow = slots[changed[index]].kind
        for entry in range(demands[flow].first_device, demands[flow].last_device):
            _unsettle_device(devices, unsettled_devices, device_numbers[entry])
    changed[-1] = 0


@bare
def _settle_device(
    slots: Records, demands: Records, devices: Records, device_slots: Ints, device_now: Floats,
    priority: Ints, num_processors: int, heap: Ints, device: int, now: int,
) -> None:  # fmt: skip
    """Give what computes on a device its speed; see [Note: computation under sharing]."""
    devices[device].unsettled = 0
    computing = devices[device].computing
    if computing == 0:
        return
    taken = 0.0
    for index in range(devices[device].first_slot, devices[device].last_slot):
        if device_now[index] > 0.0:
            taken += device_now[index] * slots[device_slots[index]].speed
    first, last = devices[device].first_stream, devices[device].last_stream
    highest, equal = np.int64(0), 0
    for stream in range(first, last):
        if slots[stream].state == COMPUTING:
            if equal == 0 or priority[stream] > highest:
                highest, equal = priority[stream], 0
            equal += priority[stream] == highest
    for stream in range(first, last):
        if slots[stream].state == COMPUTING:
            processors = processor_share(devices[device].held, num_processors, equal)
            if priority[stream] < highest:
                processors = processor_share(num_processors, num_processors, 1)
            flow = slots[stream].kind
            memory = memory_share(taken, demands[flow].memory, computing)
            parts = demands[flow].processor_part, demands[flow].memory_part
            speed = compute_speed(parts[0], parts[1], processors, memory)
            _set_speed(heap, slots, stream, speed, now)


# --- the whole ---------------------------------------------------------------------------------------------


@bare
def _head_is_due(
    tasks: Records, times: Ints, state: States, streams: Records, hosts: Records, slots: Records,
    kept_by: Keepers, heap: Ints, stream: int, now: int, last_offset: int, launch_ns: Ints, host_ns: Ints,
    host_starts: Ints, host_waits: Ints, wait_starts: Ints, waits: Ints, previous_starts: Ints,
    previous_waits: Ints,
) -> bool:  # fmt: skip
    """Tell whether the head of a stream starts or joins now; if it is known when, time it."""
    task, offset = streams[stream].task, streams[stream].offset
    instance = offset + task
    if offset > last_offset:
        return False
    if not is_launched(
        times, state, streams, hosts, stream, len(tasks), last_offset, host_ns, host_starts, host_waits
    ):
        return False
    if not _has_waited(
        times, state, streams, kept_by, stream, len(tasks), wait_starts, waits, previous_starts,
        previous_waits,
    ):  # fmt: skip
        return False
    dispatch = times[instance, DISPATCH]
    ready = ready_ns(streams[stream].free, streams[stream].waits_done)
    times[instance, READY] = ready
    slots[stream].state = STARTING
    slots[stream].task = instance
    if tasks[task].kind == COMPUTE:
        first = first_launch_ns(dispatch - host_ns[task], launch_ns[task])
        due = compute_start_ns(ready, first)
    elif tasks[task].kind == HOST_COPY:
        due = host_copy_start_ns(ready, dispatch)
    else:
        due = joined_ns(ready, dispatch)
        slots[stream].state = JOINING
    if due > now:
        _time(heap, slots, stream, due)
    return due <= now


@bare
def _start_computing(
    tasks: Records, holds: Records, times: Ints, streams: Records, slots: Records, devices: Records,
    unsettled_devices: Ints, durations: Ints, stream: int, now: int,
) -> None:  # fmt: skip
    """Let a computation run; the speed is known when this ns settles."""
    instance = slots[stream].task
    task, step = instance % len(tasks), instance // len(tasks)
    times[instance, START] = now
    slots[stream].kind = holds[task].row
    slots[stream].left = float(durations[min(step, len(durations) - 1), task])
    slots[stream].since = now
    slots[stream].speed = 0.0
    slots[stream].state = COMPUTING
    devices[streams[stream].device].computing += 1
    _unsettle_device(devices, unsettled_devices, streams[stream].device)


@bare
def _join(
    tasks: Records, holds: Records, times: Ints, state: States, streams: Records, slots: Records,
    devices: Records, groups: Records, members: Ints, unsettled_devices: Ints, stream: int, now: int,
) -> int:  # fmt: skip
    """Take part in a communication; return the instance that drives it, if it begins now, or PENDING."""
    instance = slots[stream].task
    task = instance % len(tasks)
    offset, kind = instance - task, tasks[task].kind
    times[instance, READY] = now
    state[instance] = JOINED
    slots[stream].state = IDLE
    if holds[task].processors:
        devices[streams[stream].device].held += holds[task].processors
        _unsettle_device(devices, unsettled_devices, streams[stream].device)
    if kind == COLLECTIVE:
        group = tasks[task].other
        groups[group].arrivals += 1
        if groups[group].arrivals < groups[group].last - groups[group].first:
            return PENDING
        groups[group].arrivals = 0
        for index in range(groups[group].first, groups[group].last):
            times[offset + members[index], START] = now
        return offset + members[groups[group].first]
    if kind == EAGER_SEND:
        times[instance, START] = now
        return instance
    peer = offset + tasks[task].other
    if kind == EAGER_RECV or state[peer] == 0:
        return PENDING
    times[instance, START] = now
    times[peer, START] = now
    return instance if kind == SEND else peer


@bare
def _run_until(
    until_step: int,
    last_step: int,
    num_processors: int,
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
    holds: Records,
    slots: Records,
    devices: Records,
    demands: Records,
    links: Records,
    link_numbers: Ints,
    uses: Floats,
    link_slots: Ints,
    link_places: Ints,
    link_now: Floats,
    device_numbers: Ints,
    device_places: Ints,
    device_slots: Ints,
    device_now: Floats,
    priority: Ints,
    kept_by: Keepers,
    remaining: Ints,
    heap: Ints,
    todo: Ints,
    ended: Ints,
    fresh: Ints,
    flows: Ints,
    looked_at: Ints,
    changed: Ints,
    unsettled_links: Ints,
    unsettled_devices: Ints,
    found: Ints,
    starts: Ints,
    numbers: Ints,
    amounts: Floats,
    growth: Floats,
    used: Floats,
    grown: Floats,
    speeds: Floats,
) -> bool:
    """Go on until a step has ended; False: nothing can happen any more. The first call begins at 0 ns."""
    last_offset = last_step * len(tasks)
    now = np.int64(0)
    if until_step == 0:
        for stream in range(len(streams)):
            if streams[stream].task != PENDING:
                _push(todo, stream)
    while remaining[until_step] > 0:
        if todo[-1] == 0:
            if heap[-1] == 0:
                return False
            now = slots[heap[0]].due
        while todo[-1] > 0 or (heap[-1] > 0 and slots[heap[0]].due == now):
            if todo[-1] > 0:
                todo[-1] -= 1
                stream = todo[todo[-1]]
                if not _head_is_due(
                    tasks, times, state, streams, hosts, slots, kept_by, heap, stream, now, last_offset,
                    launch_ns, host_ns, host_starts, host_waits, wait_starts, waits, previous_starts,
                    previous_waits,
                ):  # fmt: skip
                    continue
            else:
                stream = _take_first(heap, slots)
            _act(
                tasks, holds, times, state, streams, groups, members, slots, devices, demands, links,
                link_numbers, uses, link_places, link_now, device_numbers, device_places, device_now,
                durations, remaining, heap, todo, ended, fresh, unsettled_links, unsettled_devices, stream,
                now,
            )  # fmt: skip
            if ended[-1] > 0:
                _after_ends(tasks, streams, hosts, kept_by, todo, ended)
        if unsettled_links[-1] > 0 or fresh[-1] > 0:
            _settle_links(
                slots, demands, links, link_numbers, uses, link_slots, link_now, heap, fresh, flows,
                looked_at, unsettled_links, changed, found, starts, numbers, amounts, growth, used, grown,
                speeds, now,
            )  # fmt: skip
        if changed[-1] > 0:
            _unsettle_members(slots, demands, devices, device_numbers, changed, unsettled_devices)
        while unsettled_devices[-1] > 0:
            unsettled_devices[-1] -= 1
            _settle_device(
                slots, demands, devices, device_slots, device_now, priority, num_processors, heap,
                unsettled_devices[unsettled_devices[-1]], now,
            )  # fmt: skip
    return True


@bare
def _act(
    tasks: Records, holds: Records, times: Ints, state: States, streams: Records, groups: Records,
    members: Ints, slots: Records, devices: Records, demands: Records, links: Records, link_numbers: Ints,
    uses: Floats, link_places: Ints, link_now: Floats, device_numbers: Ints, device_places: Ints,
    device_now: Floats, durations: Ints, remaining: Ints, heap: Ints, todo: Ints, ended: Ints, fresh: Ints,
    unsettled_links: Ints, unsettled_devices: Ints, stream: int, now: int,
) -> None:  # fmt: skip
    """Let happen now what a slot is due for."""
    stage, instance = slots[stream].state, slots[stream].task
    task = instance % len(tasks)
    driver = PENDING  # who drives a communication that begins now
    on_wire = PENDING  # the slot of a communication whose latency is over
    moved = PENDING  # the slot of a communication that ends now
    computed = stage == LAUNCHING
    if stage == STARTING and tasks[task].kind == COMPUTE:
        _start_computing(
            tasks, holds, times, streams, slots, devices, unsettled_devices, durations, stream, now
        )
        stage = COMPUTING if slots[stream].left == 0.0 else STARTING
    elif stage == STARTING:
        times[instance, START] = now
        driver = instance
    elif stage == JOINING:
        driver = _join(
            tasks, holds, times, state, streams, slots, devices, groups, members, unsettled_devices, stream,
            now,
        )  # fmt: skip
        if tasks[task].kind == EAGER_RECV and state[instance - task + tasks[task].other] == ENDED:
            times[instance, START] = now
            computed = True
    elif stage == LATENCY:
        on_wire = stream
    elif stage == MOVING:
        moved = stream
    if stage == COMPUTING:
        devices[streams[stream].device].computing -= 1
        _unsettle_device(devices, unsettled_devices, streams[stream].device)
        computed = times[instance, DISPATCH] <= now
        if not computed:
            slots[stream].state = LAUNCHING
            _time(heap, slots, stream, times[instance, DISPATCH])
    if computed:
        slots[stream].state = IDLE
        _finish(tasks, holds, times, state, streams, devices, todo, unsettled_devices, ended, remaining,
                instance, now)  # fmt: skip
    if driver != PENDING:
        on_wire = _begin_communication(tasks, holds, slots, demands, durations, heap, driver, now)
    if on_wire != PENDING and slots[on_wire].left == 0.0:
        moved = on_wire
    elif on_wire != PENDING:
        _enter_links(
            slots, demands, links, link_numbers, uses, link_places, link_now, device_places, device_now,
            unsettled_links, fresh, on_wire, now,
        )  # fmt: skip
    if moved != PENDING:
        _end_communication(
            tasks, holds, times, state, streams, slots, devices, demands, links, link_numbers, uses,
            link_places, link_now, device_numbers, device_places, device_now, groups, members, todo, ended,
            remaining, unsettled_links, unsettled_devices, moved, now,
        )  # fmt: skip


def _compiled(sources: str) -> Any:
    """Return `_run_until` compiled and kept; see [Note: compiled once per machine]."""

    def run_until(until_step: int, last_step: int, num_processors: int, *arrays: npt.NDArray[Any]) -> bool:
        len(sources)
        ended: bool = _run_until(until_step, last_step, num_processors, *arrays)
        return ended

    return kept(run_until)


run_until = _compiled(text_of(rules, compiled, fair, kernel))

"""Tasks that wait for each other in a circle: on one device, or through transfers and collectives.

[Note: joint events]
When every send is a rendezvous, a send and its receive start together, and so do the members of a
collective: each is one event that needs all that any of its tasks needs. The plan can hang exactly when
the graph of events over (task before on the stream, waits) has a cycle. Sends that are handed over
eagerly only remove waits, so a plan without a cycle never hangs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from simulator.plan.checks.collectives import collective_sequences
from simulator.plan.checks.facts import DeviceFacts, Facts, Indices
from simulator.plan.checks.transfers import matched_transfers
from simulator.plan.checks.violation import Violation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Events:
    """Tasks of one or several devices, numbered one after another, joined into events.

    Args:
        devices: the devices.
        offsets: the number of each device's first task, and the number of tasks.
        event: int64 [tasks], the event of each task; an event is known by its first task.
        members: tasks of each event of several tasks.
    """

    devices: Sequence[DeviceFacts]
    offsets: Sequence[int]
    event: Indices
    members: dict[int, list[int]]

    def tasks_of(self, event: int) -> Sequence[int]:
        return self.members.get(event, (event,))

    def place(self, task: int) -> tuple[DeviceFacts, int]:
        """Return the device of a task and its dispatch position."""
        number = bisect_right(self.offsets, task) - 1
        return self.devices[number], task - self.offsets[number]

    def needs(self, task: int) -> list[int]:
        """Return what must have completed before a task starts: its waits and the task before it."""
        device, position = self.place(task)
        offset, before = task - position, device.previous[position]
        waits = device.plan.tasks.waits.row(position)
        return [offset + need for need in ((*waits, before) if before >= 0 else waits)]

    def pairs(self) -> tuple[Indices, Indices]:
        """Return every (event that is needed, event that needs it)."""
        needed, needing = [], []
        for device, offset in zip(self.devices, self.offsets, strict=False):
            waits, before = device.plan.tasks.waits, np.array(device.previous, dtype=np.int64)
            tasks = np.arange(len(before))
            needed += [waits.values + offset, before[before >= 0] + offset]
            needing += [np.repeat(tasks, np.diff(waits.starts)) + offset, tasks[before >= 0] + offset]
        return self.event[np.concatenate(needed)], self.event[np.concatenate(needing)]


def check_cycles(facts: Facts) -> list[Violation]:
    """Find devices whose tasks wait in a circle through stream order and waits alone."""
    found = []
    for device in facts.devices:
        if device.stuck:
            count = len(device.previous)
            events = _Events(devices=(device,), offsets=(0, count), event=np.arange(count), members={})
            cycle = _cycle(events, frozenset(device.stuck))
            chain = " -> ".join(device.codes[task] for task in cycle)
            message = f"tasks wait for each other: rank {device.rank}: {chain} (each waits for the next)"
            names = device.names(tuple(dict.fromkeys(cycle)))
            found.append(Violation(rule="cycle", message=message, tasks=names))
    return found


def check_rendezvous(facts: Facts) -> list[Violation]:
    """Find a circular wait among all devices when every send waits for its receive."""
    events = _joint_events(facts)
    blocked = _blocked(events)
    if not blocked:
        return []
    places = [events.place(task) for task in _cycle(events, blocked)]
    names = [device.name(position) for device, position in places]
    message = (
        "circular wait when every send waits for its receive; each waits for or goes with the next: "
        f"{' -> '.join(names)} ({_num_tasks(events, blocked)} of {len(events.event)} tasks never start)"
    )
    return [Violation(rule="circular-wait", message=message, tasks=tuple(dict.fromkeys(names)))]


def _joint_events(facts: Facts) -> _Events:
    sizes = [len(device.previous) for device in facts.devices]
    offsets = list(accumulate(sizes, initial=0))
    joint = [((match.source, match.send), (match.target, match.recv)) for match in matched_transfers(facts)]
    together: list[Sequence[tuple[int, int]]] = [*joint, *_joint_collectives(facts)]
    event = np.arange(offsets[-1])
    members: dict[int, list[int]] = {}
    for places in together:
        tasks = sorted(offsets[rank] + task for rank, task in places)
        members[tasks[0]] = tasks
        for task in tasks[1:]:
            event[task] = tasks[0]
    return _Events(devices=facts.devices, offsets=offsets, event=event, members=members)


def _joint_collectives(facts: Facts) -> list[Sequence[tuple[int, int]]]:
    """Return the tasks that meet in each collective: the n-th of a group on each of its pipeline ranks."""
    found: list[Sequence[tuple[int, int]]] = []
    for sequences in collective_sequences(facts):
        ranks, shared = list(sequences), min(len(tasks) for tasks in sequences.values())
        if len(ranks) > 1:
            found += [[(rank, sequences[rank][number]) for rank in ranks] for number in range(shared)]
    return found


def _blocked(events: _Events) -> frozenset[int]:
    """Return the events that no order can start."""
    num_tasks = len(events.event)
    needed, needing = events.pairs()
    missing = np.bincount(needing, minlength=num_tasks).tolist()
    starts = np.concatenate([[0], np.cumsum(np.bincount(needed, minlength=num_tasks))]).tolist()
    followers = needing[np.argsort(needed, kind="stable")].tolist()
    is_event = events.event == np.arange(num_tasks)
    ready = np.flatnonzero(is_event & (np.array(missing, dtype=np.int64) == 0)).tolist()
    for event in ready:
        for follower in followers[starts[event] : starts[event + 1]]:
            missing[follower] -= 1
            if missing[follower] == 0:
                ready.append(follower)
    return frozenset(event for event, count in enumerate(missing) if count)


def _num_tasks(events: _Events, blocked: Collection[int]) -> int:
    return sum(len(events.tasks_of(event)) for event in blocked)


def _cycle(events: _Events, blocked: frozenset[int]) -> list[int]:
    """Return a short cycle of `blocked` as tasks: each needs the next or is in its event; ends meet."""
    start = _event_on_cycle(events, blocked)
    reached: dict[int, tuple[int, int]] = {}
    queue = deque([start])
    while start not in reached:
        event = queue.popleft()
        for task, need in _blocked_needs(events, event, blocked):
            target = int(events.event[need])
            if target not in reached:
                reached[target] = (task, need)
                queue.append(target)
    steps = [reached[start]]
    while events.event[steps[-1][0]] != start:
        steps.append(reached[events.event[steps[-1][0]]])
    walk = [task for step in reversed(steps) for task in step]
    walk = [task for place, task in enumerate(walk) if place == 0 or task != walk[place - 1]]
    return walk if walk[0] == walk[-1] else [*walk, walk[0]]


def _event_on_cycle(events: _Events, blocked: frozenset[int]) -> int:
    """Follow needs from the first blocked event until one repeats."""
    event, seen = min(blocked), set[int]()
    while event not in seen:
        seen.add(event)
        event = int(events.event[_blocked_needs(events, event, blocked)[0][1]])
    return event


def _blocked_needs(events: _Events, event: int, blocked: frozenset[int]) -> list[tuple[int, int]]:
    """Return (task of the event, task it needs) for every need that is blocked itself."""
    pairs = ((task, need) for task in events.tasks_of(event) for need in events.needs(task))
    return [(task, need) for task, need in pairs if int(events.event[need]) in blocked]

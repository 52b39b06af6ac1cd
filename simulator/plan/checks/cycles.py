"""Tasks that wait for each other in a circle: on one device, or through transfers and collectives.

[Note: joint events]
When every send is a rendezvous, a send and its receive start together, and so do the members of a
collective: each is one event that needs all that any of its tasks needs. The plan can hang exactly when
the graph of events over (task before on the stream, waits) has a cycle. Sends that are handed over
eagerly only remove waits, so a plan without a cycle never hangs. The shortest cycle is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.plan.checks.collectives import joint_collectives
from simulator.plan.checks.facts import DeviceFacts, Facts, Indices
from simulator.plan.checks.shortest_cycle import Digraph
from simulator.plan.checks.transfers import matched_transfers
from simulator.plan.checks.violation import Violation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Events:
    """Tasks of one or several devices, numbered one after another, joined into events.

    Args:
        devices: the devices.
        offsets: the number of each device's first task, and the number of tasks.
        event: int64 [tasks], the event of each task; an event is known by its first task.
    """

    devices: Sequence[DeviceFacts]
    offsets: Indices
    event: Indices

    def place(self, task: int) -> tuple[DeviceFacts, int]:
        """Return the device of a task and its dispatch position."""
        number = int(np.searchsorted(self.offsets, task, side="right")) - 1
        return self.devices[number], task - int(self.offsets[number])

    def needs(self, task: int) -> list[int]:
        """Return what must have completed before a task starts: its waits and the task before it."""
        device, position = self.place(task)
        offset, before = task - position, int(device.previous[position])
        waits = device.plan.tasks.waits.row(position)
        return [offset + need for need in ((*waits, before) if before >= 0 else waits)]

    def graph(self) -> Digraph:
        """Return the events, with an edge to every event that needs one."""
        needed, needing = [], []
        for device, offset in zip(self.devices, self.offsets.tolist(), strict=False):
            waits, before = device.plan.tasks.waits, device.previous
            tasks = np.arange(len(before))
            needed += [waits.values + offset, before[before >= 0] + offset]
            needing += [np.repeat(tasks, np.diff(waits.starts)) + offset, tasks[before >= 0] + offset]
        sources, targets = self.event[np.concatenate(needed)], self.event[np.concatenate(needing)]
        return Digraph(count=len(self.event), sources=sources, targets=targets)

    def walk(self, cycle: Sequence[int]) -> list[int]:
        """Return a cycle of events as tasks: each needs the next or is in its event; ends meet.

        It begins with the first task of the first device that is in it.
        """
        events = cycle[::-1]
        walk: list[int] = []
        for event, after in zip(events, (*events[1:], events[0]), strict=True):
            tasks = np.flatnonzero(self.event == event).tolist()
            pairs = ((task, need) for task in tasks for need in self.needs(task))
            walk += next((task, need) for task, need in pairs if self.event[need] == after)
        ring = [task for place, task in enumerate(walk) if task != walk[place - 1]]
        first = ring.index(min(ring))
        return [*ring[first:], *ring[: first + 1]]


def check_cycles(facts: Facts) -> list[Violation]:
    """Find devices whose tasks wait in a circle through stream order and waits alone."""
    found = []
    for device in facts.devices:
        if device.stuck:
            count = len(device.previous)
            events = _Events(devices=(device,), offsets=np.array([0, count]), event=np.arange(count))
            cycle = events.walk(events.graph().shortest_cycle())
            chain = " -> ".join(device.codes[task] for task in cycle)
            message = f"tasks wait for each other: rank {device.rank}: {chain} (each waits for the next)"
            names = device.names(tuple(dict.fromkeys(cycle)))
            found.append(Violation(rule="cycle", message=message, tasks=names))
    return found


def check_rendezvous(facts: Facts) -> list[Violation]:
    """Find a circular wait among all devices when every send waits for its receive."""
    events = _joint_events(facts)
    graph = events.graph()
    stuck = graph.unsorted()
    if not len(stuck):
        return []
    places = [events.place(task) for task in events.walk(graph.shortest_cycle())]
    names = [device.name(position) for device, position in places]
    blocked = int(np.isin(events.event, stuck).sum())
    message = (
        "circular wait when every send waits for its receive; each waits for or goes with the next: "
        f"{' -> '.join(names)} ({blocked} of {len(events.event)} tasks never start)"
    )
    return [Violation(rule="circular-wait", message=message, tasks=tuple(dict.fromkeys(names)))]


def _joint_events(facts: Facts) -> _Events:
    offsets = np.zeros(len(facts.devices) + 1, dtype=np.int64)
    np.cumsum([len(device.previous) for device in facts.devices], out=offsets[1:])
    event = np.arange(offsets[-1])
    sends, recvs, sent, received = matched_transfers(facts)
    one = offsets[sends.rank[sent]] + sends.task[sent]
    other = offsets[recvs.rank[received]] + recvs.task[received]
    event[np.maximum(one, other)] = np.minimum(one, other)
    for places in joint_collectives(facts):
        tasks = sorted(int(offsets[rank]) + task for rank, task in places)
        event[tasks[1:]] = tasks[0]
    return _Events(devices=facts.devices, offsets=offsets, event=event)

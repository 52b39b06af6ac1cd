"""What sharing costs on the critical path: how much longer its parts took than alone, beside whom, over what.

[Note: who slows whom]  A communication is slowed by others that are on the wire at the same time and load
    one of its links; a computation by communication of its device that holds processors, from when it joins,
    or memory bandwidth, and by computation on other streams. Who overlaps longest is named first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from simulator.insight.critical_path import CriticalPath, PathPart, kind_names
from simulator.insight.network import Ints, Network, alone_ns, build_network
from simulator.plan import NONE, Plan
from simulator.sharing import Sharing
from simulator.timeline.timeline import Timeline
from simulator.workload import Workload

MOST_PARTS = 200
"""Parts, those that lose most, of which it is looked up what slowed them."""
PROCESSORS, MEMORY = "processors", "memory bandwidth"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowed:
    """Parts of the path of one kind that took longer than alone, within the last step.

    Args:
        kind: F, B, ..., exposed_tp, ...
        alone_ns, lasted_ns: what they take alone, and took.
        beside: kinds of what ran at the same time on the same, the longest overlap first.
        over: what was shared: names of links, processors, memory bandwidth.
    """

    kind: str
    alone_ns: int
    lasted_ns: int
    beside: tuple[str, ...]
    over: tuple[str, ...]


@dataclass(slots=True)
class _Sum:
    alone_ns: int = 0
    lasted_ns: int = 0
    beside: dict[str, int] = field(default_factory=dict)
    over: dict[str, int] = field(default_factory=dict)


def slowed_on_path(
    plan: Plan, workload: Workload, timeline: Timeline, *, path: CriticalPath
) -> tuple[Slowed, ...]:
    """Return what sharing made longer on the path, by kind, most time lost first; empty without sharing."""
    if workload.sharing is None:
        return ()
    names = kind_names(plan)
    alone = alone_ns(workload, steps=timeline.num_steps)
    driver = _drivers(workload)
    slowed: list[tuple[int, PathPart]] = []
    for part in path.parts:
        step, task = divmod(part.instance, path.num_tasks)
        lost = part.time_ns - int(alone[step * path.num_tasks + driver[task]])
        if not part.is_host and lost > 0 and part.within(path.window_ns) == part.time_ns:
            slowed.append((lost, part))
    slowed.sort(key=lambda found: (-found[0], found[1].instance))
    sums: dict[str, _Sum] = {}
    for lost, part in slowed:
        total = sums.setdefault(names[part.instance % path.num_tasks], _Sum())
        total.alone_ns += part.time_ns - lost
        total.lasted_ns += part.time_ns
    neighbours = _Neighbours(build_network(workload, timeline), workload, workload.sharing, names=names)
    for _, part in slowed[:MOST_PARTS]:
        neighbours.add(part, sums[names[part.instance % path.num_tasks]])
    found = [
        Slowed(
            kind=kind,
            alone_ns=total.alone_ns,
            lasted_ns=total.lasted_ns,
            beside=_longest_first(total.beside),
            over=_longest_first(total.over),
        )
        for kind, total in sums.items()
    ]
    return tuple(sorted(found, key=lambda slow: (slow.alone_ns - slow.lasted_ns, slow.kind)))


def _longest_first(times: dict[str, int]) -> tuple[str, ...]:
    return tuple(sorted(times, key=lambda name: (-times[name], name)))


def _drivers(workload: Workload) -> Ints:
    """Return by task the one whose duration counts: the sender, the first member of a collective, itself."""
    tasks = np.arange(workload.num_tasks)
    driver = np.where((workload.partner != NONE) & ~workload.is_send, workload.partner, tasks)
    if len(workload.members.values):
        first = workload.members.values[workload.members.starts[:-1]]
        driver = np.where(workload.collective == NONE, driver, first[workload.collective])
    return driver


class _Neighbours:
    """What runs at the same time as a part, and shares something with it."""

    def __init__(self, network: Network, workload: Workload, sharing: Sharing, *, names: list[str]) -> None:
        num_tasks = workload.num_tasks
        steps = len(network.end_ns) // max(num_tasks, 1)
        self.num_tasks, self.names = num_tasks, names
        self.is_compute = np.tile(workload.is_compute, steps)
        self.driver = _drivers(workload)
        self.start, self.end = network.start_ns, network.end_ns
        self.joined = np.where(
            self.is_compute, network.start_ns, np.maximum(network.ready_ns, network.dispatch_ns)
        )
        self.device = np.repeat(np.arange(workload.num_devices), np.diff(workload.device_starts))
        self.drives = np.tile(self.driver == np.arange(num_tasks), steps) & ~self.is_compute
        self.row = np.where(workload.price == NONE, len(sharing.growth) - 1, workload.price)[self.driver]
        self.sharing = sharing

    def add(self, part: PathPart, total: _Sum) -> None:
        """Note what slowed a part."""
        task = part.instance % self.num_tasks
        share = self._of_compute if self.is_compute[part.instance] else self._of_wire
        for name, over, overlap in share(part, task):
            total.beside[name] = total.beside.get(name, 0) + overlap
            for resource in over:
                total.over[resource] = total.over.get(resource, 0) + overlap

    def _of_wire(self, part: PathPart, task: int) -> Iterable[tuple[str, list[str], int]]:
        mine = self._links(task)
        overlap = np.minimum(self.end, part.end_ns) - np.maximum(self.start, part.begin_ns)
        driver = part.instance - task + self.driver[task]
        for instance in np.flatnonzero(self.drives & (overlap > 0)).tolist():
            other = instance % self.num_tasks
            shared = sorted(mine & self._links(other)) if instance != driver else []
            if shared:
                links = [self.sharing.link_names[link] for link in shared]
                yield self.names[other], links, int(overlap[instance])

    def _of_compute(self, part: PathPart, task: int) -> Iterable[tuple[str, list[str], int]]:
        overlap = np.minimum(self.end, part.end_ns) - np.maximum(self.joined, part.begin_ns)
        here = np.resize(self.device == self.device[task], len(overlap))
        row, sharing = self.row[task], self.sharing
        for instance in np.flatnonzero(here & (overlap > 0)).tolist():
            other = instance % self.num_tasks
            computes = bool(self.is_compute[instance])
            over = []
            if (computes or sharing.processors[other]) and sharing.processor_part[row]:
                over.append(PROCESSORS)
            if (computes or sharing.memory[self.row[other]]) and sharing.memory_part[row]:
                over.append(MEMORY)
            if over and instance != part.instance:
                yield self.names[other], over, int(overlap[instance])

    def _links(self, task: int) -> set[int]:
        starts, row = self.sharing.link_starts, int(self.row[task])
        return set(self.sharing.links[starts[row] : starts[row + 1]].tolist())

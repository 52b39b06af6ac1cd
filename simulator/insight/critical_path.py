"""The critical path: back from the last end to time 0, always to what something waited for.

[Note: parts of the path]  Parts follow one another without a gap: tasks while they run, messages and
    collectives while they are on the wire, and the host where a task waits for its launch or lasts as long as
    its launches do. That part reaches back over all launches before, to the end of a task that the host
    awaited (it runs ahead so far and no further), or to time 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.errors import check_invariant
from simulator.insight.network import Network, build_network
from simulator.plan import NONE, Plan, TaskKind
from simulator.timeline.attribution import BUSY, communication_labels
from simulator.timeline.timeline import Timeline
from simulator.workload import Workload

HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class PathPart:
    """One part of the path.

    Args:
        instance: step * num_tasks + task of what runs, or whose launch is waited for.
        begin_ns, end_ns: when.
        is_host: the launches that lead to the task, not the task.
    """

    instance: int
    begin_ns: int
    end_ns: int
    is_host: bool = False

    @property
    def time_ns(self) -> int:
        """Return how long the part is."""
        return self.end_ns - self.begin_ns

    def within(self, window: tuple[int, int]) -> int:
        """Return how much of the part lies in a window."""
        return max(0, min(self.end_ns, window[1]) - max(self.begin_ns, window[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """The parts in order of time, from 0 to the end of the last step.

    Args:
        parts: those that last.
        window_ns: the last step.
        num_tasks: tasks of a step.
    """

    parts: tuple[PathPart, ...]
    window_ns: tuple[int, int]
    num_tasks: int

    def by_kind_ns(self, plan: Plan) -> dict[str, int]:
        """Return ns of the last step's path by kind, most first: F, B, ..., exposed_pp, ..., host."""
        return self._summed(kind_names(plan), host=HOST)

    def by_rank_ns(self, workload: Workload) -> dict[str, int]:
        """Return ns of the last step's path by pipeline rank, most first."""
        ranks = [
            str(rank)
            for rank, first, last in zip(
                workload.pipeline_rank.tolist(),
                workload.device_starts[:-1].tolist(),
                workload.device_starts[1:].tolist(),
                strict=True,
            )
            for _ in range(last - first)
        ]
        return self._summed(ranks, host=None)

    def _summed(self, names: list[str], *, host: str | None) -> dict[str, int]:
        found: dict[str, int] = {}
        for part in self.parts:
            name = host if part.is_host and host else names[part.instance % self.num_tasks]
            found[name] = found.get(name, 0) + part.within(self.window_ns)
        ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))
        return {name: time for name, time in ordered if time}


def kind_names(plan: Plan) -> list[str]:
    """Return what every task is called where time is summed by kind: F, B, ..., exposed_pp, ..."""
    found = []
    for device in plan.device_plans:
        labels = communication_labels(plan, device)
        found += [
            TaskKind(kind).name if label in BUSY else label.name.lower()
            for kind, label in zip(device.tasks.kind.tolist(), labels, strict=True)
        ]
    return found


def critical_path(workload: Workload, timeline: Timeline) -> CriticalPath:
    """Return a path of tasks without slack to the end of the last step; of several, the first found."""
    network = build_network(workload, timeline)
    walk = _Walk(network=network, workload=workload)
    parts = tuple(reversed([part for part in walk.parts(timeline.makespan_ns) if part.time_ns]))
    covered = sum(part.time_ns for part in parts)
    check_invariant(covered == timeline.makespan_ns, "the critical path has a gap")
    return CriticalPath(parts=parts, window_ns=timeline.window_ns, num_tasks=workload.num_tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Walk:
    network: Network
    workload: Workload

    def parts(self, makespan_ns: int) -> list[PathPart]:
        """Return the parts from the last one back."""
        found: list[PathPart] = []
        instance = int(self.network.end_ns.argmax()) if makespan_ns else NONE
        while instance != NONE:
            end = int(self.network.end_ns[instance])
            begin, cause = self._began(instance)
            found.append(PathPart(instance=instance, begin_ns=begin, end_ns=end))
            instance = self._waited_for(cause, begin)
            if instance == NONE and begin:
                instance, launched = self._awaited(cause)
                found.append(PathPart(instance=cause, begin_ns=launched, end_ns=begin, is_host=True))
        return found

    def _began(self, instance: int) -> tuple[int, int]:
        """Return since when what ends `instance` lasts, and the instance that decided this beginning."""
        net, task = self.network, instance % self.workload.num_tasks
        start, end = int(net.start_ns[instance]), int(net.end_ns[instance])
        sender = int(net.sender[instance])
        if self.workload.is_compute[task]:
            is_launched = end > start + int(net.duration_ns[instance])
            return (end if is_launched else start), instance
        if sender != NONE:
            on_wire = int(net.end_ns[sender]) == end
            return (int(net.start_ns[sender]), sender) if on_wire else (end, instance)
        for member in net.joined.row(int(net.meeting[instance])):
            if max(int(net.ready_ns[member]), int(net.dispatch_ns[member])) == start:
                return start, member
        return start, instance

    def _waited_for(self, cause: int, time_ns: int) -> int:
        """Return what ended when `cause` began, or NONE: its launch decided, or the start of everything."""
        if not time_ns or int(self.network.ready_ns[cause]) != time_ns:
            return NONE
        for earlier in self.network.before.row(cause):
            if int(self.network.end_ns[earlier]) == time_ns:
                return earlier
        return NONE

    def _awaited(self, cause: int) -> tuple[int, int]:
        """Return whose end the host awaited before it came to `cause`, and when; NONE and 0: nothing's."""
        net, at = self.network, cause
        while at != NONE:
            begin = int(net.host_begin_ns[at])
            for earlier in net.host_before.row(at) if begin else ():
                if int(net.end_ns[earlier]) == begin:
                    return earlier, begin
            at = int(net.launched_before[at])
        return NONE, 0

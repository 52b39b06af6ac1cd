"""Slack: how much later each task may end without moving the end of the last step.

[Note: latest end]  Backwards through the `Network`, each task once: a task must have ended when those that
    wait for it, and the next on its stream, must start. All members of a collective, and both ends of a
    message that is not eager, must start for the one among them that may wait least. An eager message must
    have been sent when its receive must end. A host must begin to launch a task in time for its start, for
    its end, and for the next launch; what it awaits must have ended by then. A task that ends with its last
    launch can be delayed from there on only.
[Note: slack under sharing]  Where links, processors or memory bandwidth are shared, durations are kept as
    they were, although a task that moves slows others, or no longer does: slack is then an estimate.
"""

from __future__ import annotations

import numpy as np

from cost_models.errors import check_invariant
from simulator.insight.network import Ints, Network, build_network
from simulator.plan import NONE
from simulator.timeline.timeline import Timeline
from simulator.workload import Workload


def slack_ns(workload: Workload, timeline: Timeline) -> Ints:
    """Return by how much each task may end later, int64 [steps, tasks], 0 on every critical path."""
    end = build_network(workload, timeline).end_ns.reshape(timeline.num_steps, -1)
    return latest_end_ns(workload, timeline) - end


def latest_end_ns(workload: Workload, timeline: Timeline) -> Ints:
    """Return when each task may end without moving the end of the last step, int64 [steps, tasks].

    Of what meets (a collective, a message that is not eager) all must be delayed together.
    """
    network = build_network(workload, timeline)
    latest = _Backwards(network, workload, horizon=timeline.makespan_ns).latest()
    found = np.array(latest, dtype=np.int64)
    check_invariant(bool((found >= network.end_ns).all()), "a task ends after its latest end")
    return found.reshape(timeline.num_steps, -1)


class _Backwards:
    """One walk from the last tasks back; plain lists, since numbers are looked up one by one.

    A node is a meeting, or the launch of an instance (meetings + instance): settled once all that follow are.
    """

    def __init__(self, network: Network, workload: Workload, *, horizon: int) -> None:
        steps = len(network.meeting) // max(workload.num_tasks, 1)
        self.starts, self.before = network.before.starts.tolist(), network.before.values.tolist()
        self.firsts, self.joined = network.joined.starts.tolist(), network.joined.values.tolist()
        self.meeting, self.duration = network.meeting.tolist(), network.duration_ns.tolist()
        self.sender = network.sender.tolist()
        self.is_compute, self.launch = (
            workload.is_compute.tolist() * steps,
            workload.launch_ns.tolist() * steps,
        )
        self.host, self.launched_before = workload.host_ns.tolist() * steps, network.launched_before.tolist()
        self.host_before = network.host_before.to_rows()
        self.hosts_wait = bool(len(network.host_before.values))
        self.num_meetings = len(self.firsts) - 1
        self.open_ends = _open_ends(network, hosts_wait=self.hosts_wait)
        self.latest_end = [horizon] * len(self.meeting)
        self.latest_launch = [horizon] * len(self.meeting)
        self.settled = [node for node, count in enumerate(self.open_ends) if not count]

    def latest(self) -> list[int]:
        """Return the latest end of every instance."""
        while self.settled:
            node = self.settled.pop()
            if node < self.num_meetings:
                self._meet(self.joined[self.firsts[node] : self.firsts[node + 1]])
            else:
                self._launch(node - self.num_meetings)
        return self.latest_end

    def _meet(self, members: list[int]) -> None:
        """Tell what comes before a meeting by when it must have ended."""
        must_end = min(map(self.latest_end.__getitem__, members))
        for member in members:
            self.latest_end[member] = must_end
            must_start = must_end - self.duration[member]
            sender = self.sender[member]
            if sender != NONE:
                must_start = must_end
                self._must_end(sender, must_end)
            for earlier in self.before[self.starts[member] : self.starts[member + 1]]:
                self._must_end(earlier, must_start)
            if self.hosts_wait:
                self._must_launch(member, must_start=must_start, must_end=must_end)

    def _must_launch(self, instance: int, *, must_start: int, must_end: int) -> None:
        """Note by when a host must begin to launch an instance."""
        limit = must_start - self.host[instance]
        if self.is_compute[instance]:
            limit = min(must_start - self.launch[instance], must_end - self.host[instance])
        self.latest_launch[instance] = min(self.latest_launch[instance], limit)
        self._close(self.num_meetings + instance)

    def _launch(self, instance: int) -> None:
        """Tell what a host awaits, and launches before, by when it must begin to launch an instance."""
        limit, previous = self.latest_launch[instance], self.launched_before[instance]
        for earlier in self.host_before[instance]:
            self._must_end(earlier, limit)
        if previous != NONE:
            self.latest_launch[previous] = min(self.latest_launch[previous], limit - self.host[previous])
            self._close(self.num_meetings + previous)

    def _must_end(self, instance: int, limit: int) -> None:
        if limit < self.latest_end[instance]:
            self.latest_end[instance] = limit
        self._close(self.meeting[instance])

    def _close(self, node: int) -> None:
        self.open_ends[node] -= 1
        if not self.open_ends[node]:
            self.settled.append(node)


def _open_ends(network: Network, *, hosts_wait: bool) -> list[int]:
    """Return by node how many edges lead on from it."""
    count = len(network.joined.starts) - 1
    awaited = network.meeting[network.host_before.values]
    found = np.bincount(network.meeting[network.before.values], minlength=count)
    found += np.bincount(awaited, minlength=count)
    found[network.meeting[network.sender[network.sender != NONE]]] += 1
    launches = np.ones(len(network.meeting) if hosts_wait else 0, dtype=np.int64)
    if hosts_wait:
        launches[network.launched_before[network.launched_before != NONE]] += 1
    settled: list[int] = np.concatenate([found, launches]).tolist()
    return settled

"""Slack: how much later each task may end without moving the end of the last step.

[Note: latest end]  Backwards through the `Network`, each task once: a task must have ended when those that
    wait for it, and the next on its stream, must start. All members of a collective, and both ends of a
    message that is not eager, must start for the one among them that may wait least. An eager message must
    have left in time for both what follows its send and what follows its receive. The host is never late: it
    does not wait. A task that ends with its last launch can be delayed from there on only.
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
    latest = np.array(_latest(network, workload, horizon=timeline.makespan_ns), dtype=np.int64)
    check_invariant(bool((latest >= network.end_ns).all()), "a task ends after its latest end")
    return latest.reshape(timeline.num_steps, -1)


def _latest(network: Network, workload: Workload, *, horizon: int) -> list[int]:
    """Return the latest end of every instance; plain lists, since numbers are looked up one by one."""
    num_tasks = workload.num_tasks
    starts, before = network.before.starts.tolist(), network.before.values.tolist()
    firsts, joined = network.joined.starts.tolist(), network.joined.values.tolist()
    meeting, duration = network.meeting.tolist(), network.duration_ns.tolist()
    partner, is_send = network.partner.tolist(), workload.is_send.tolist()
    open_ends = _open_ends(network, workload)
    latest = [horizon] * len(meeting)
    leaves = [horizon] * len(meeting)
    stack = [number for number, count in enumerate(open_ends) if not count]
    while stack:
        number = stack.pop()
        members = joined[firsts[number] : firsts[number + 1]]
        must_end = min(map(latest.__getitem__, members))
        for member in members:
            latest[member] = must_end
            must_start = must_end - duration[member]
            other = partner[member]
            if other != NONE:
                if is_send[member % num_tasks]:
                    must_start = min(must_start, leaves[member])
                else:
                    leaves[other], must_start = must_start, must_end
                    open_ends[meeting[other]] -= 1
                    if not open_ends[meeting[other]]:
                        stack.append(meeting[other])
            for earlier in before[starts[member] : starts[member + 1]]:
                if must_start < latest[earlier]:
                    latest[earlier] = must_start
                follows = meeting[earlier]
                open_ends[follows] -= 1
                if not open_ends[follows]:
                    stack.append(follows)
    return latest


def _open_ends(network: Network, workload: Workload) -> list[int]:
    """Return by meeting how many edges lead on from it: it is settled once all of them are."""
    count = len(network.joined.starts) - 1
    found = np.bincount(network.meeting[network.before.values], minlength=count)
    is_send = np.resize(workload.is_send, len(network.meeting))
    sends = np.flatnonzero((network.partner != NONE) & is_send)
    found[network.meeting[sends]] += 1
    settled: list[int] = found.tolist()
    return settled

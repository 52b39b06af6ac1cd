"""Transfers that do not happen, or carry something else between others."""

from __future__ import annotations

import random
from dataclasses import replace

from simulator.plan import RECV_KINDS, SEND_KINDS, Plan
from tests.mutations.mutant import Mutant, anyone, both_ends, places_of, shuffled
from tests.plan_edits import edited, name, tasks_of, with_tasks, without


def drop_transfer(plan: Plan, choose: random.Random) -> Mutant | None:
    """A value never travels: neither end of its transfer is listed."""
    first = anyone(plan, choose, SEND_KINDS)
    if first is None:
        return None
    rank, number = first
    what = f"{name(plan, rank, number)} and its receive left out"
    for place, one in both_ends(plan, rank, number):
        plan = with_tasks(plan, place, without(tasks_of(plan.device_plans[place]), {one}))
    return Mutant(plan=plan, what=what)


def wrong_peer(plan: Plan, choose: random.Random) -> Mutant | None:
    """A transfer names a rank that does not take part in it."""
    first = anyone(plan, choose, SEND_KINDS | RECV_KINDS)
    if first is None or plan.num_pipeline_ranks < 3:
        return None
    rank, number = first
    task = plan.device_plans[rank].tasks.task(number)
    others = [peer for peer in range(plan.num_pipeline_ranks) if peer not in {rank, task.peer}]
    peer = choose.choice(others)
    what = f"{name(plan, rank, number)} has peer {peer} instead of {task.peer}"
    return Mutant(plan=edited(plan, rank, number, peer=peer), what=what)


def wrong_edge(plan: Plan, choose: random.Random) -> Mutant | None:
    """A transfer says that it carries the tensors between two other stages."""
    first = anyone(plan, choose, SEND_KINDS | RECV_KINDS)
    if first is None or len(plan.edges) < 2:
        return None
    rank, number = first
    task = plan.device_plans[rank].tasks.task(number)
    edge = choose.choice([other for other in range(len(plan.edges)) if other != task.edge])
    what = f"{name(plan, rank, number)} carries edge {edge} instead of {task.edge}"
    return Mutant(plan=edited(plan, rank, number, edge=edge), what=what)


def wrong_transfer_microbatch(plan: Plan, choose: random.Random) -> Mutant | None:
    """Both ends of two transfers of a channel say each other's microbatch: values are swapped."""
    for rank, one in shuffled(choose, places_of(plan, SEND_KINDS)):
        task = plan.device_plans[rank].tasks.task(one)
        same = [
            n for n, t in enumerate(plan.device_plans[rank].tasks)
            if (t.kind, t.edge, t.stream) == (task.kind, task.edge, task.stream)
            and t.microbatch != task.microbatch
        ]  # fmt: skip
        if same:
            other = choose.choice(same)
            what = f"{name(plan, rank, one)} and {name(plan, rank, other)} say each other's microbatch"
            numbers = [plan.device_plans[rank].tasks.task(n).microbatch for n in (one, other)]
            places = [both_ends(plan, rank, n) for n in (one, other)]
            for ends, microbatch in zip(places, numbers[::-1], strict=True):
                for place, number in ends:
                    plan = edited(plan, place, number, microbatch=microbatch)
            return Mutant(plan=plan, what=what)
    return None


def wrong_size_at_one_end(plan: Plan, choose: random.Random) -> Mutant | None:
    """Two ends of a transfer disagree about its shape or dtype."""
    first = anyone(plan, choose, SEND_KINDS | RECV_KINDS)
    if first is None:
        return None
    rank, number = first
    size = int(plan.device_plans[rank].tasks.size_bytes[number])
    wrong = choose.choice([size // 2, size * 2, size - 1])
    what = f"{name(plan, rank, number)} moves {wrong} instead of {size} bytes"
    return Mutant(plan=edited(plan, rank, number, size_bytes=wrong), what=what)


def wrong_size_at_both_ends(plan: Plan, choose: random.Random) -> Mutant | None:
    """Both ends of a transfer move less than the tensors between the stages have."""
    first = anyone(plan, choose, SEND_KINDS)
    if first is None:
        return None
    rank, number = first
    size = int(plan.device_plans[rank].tasks.size_bytes[number])
    wrong = choose.choice([size - 1, size * 3 // 4])
    what = f"{name(plan, rank, number)} and its receive move {wrong} instead of {size} bytes"
    for place, one in both_ends(plan, rank, number):
        plan = edited(plan, place, one, size_bytes=wrong)
    return Mutant(plan=plan, what=what)


def wrong_tensor(plan: Plan, choose: random.Random) -> Mutant | None:
    """A tensor that crosses ranks has another shape or dtype than its transfers move."""
    values = [value for edge in plan.edges for value in edge.values]
    if not values:
        return None
    number, output = choose.choice(values)
    segment = plan.segments[number]
    spec = segment.outputs[output]
    dtype = "bf16" if spec.dtype == "fp32" else "fp32"
    wider = (*spec.shape[:-1], spec.shape[-1] + 1)
    changed = choose.choice([replace(spec, dtype=dtype), replace(spec, shape=wider)])
    outputs = tuple(changed if place == output else one for place, one in enumerate(segment.outputs))
    segments = list(plan.segments)
    segments[number] = replace(segment, outputs=outputs)
    what = f"output {output} of segment {number} is {changed.dtype}{list(changed.shape)}"
    return Mutant(plan=replace(plan, segments=tuple(segments)), what=what)

"""Buckets of parameters that are mistaken for others, or lack or share a parameter."""

from __future__ import annotations

import random
from dataclasses import replace

from simulator.plan import NONE, Plan
from tests.mutations.mutant import K, Mutant, places_of, shuffled
from tests.plan_edits import REDUCTIONS, edited, name, with_device


def reduce_wrong_bucket(plan: Plan, choose: random.Random) -> Mutant | None:
    """A collective or an update works on another bucket: one is left out, one is done twice."""
    kinds = REDUCTIONS | {K.UPDATE, K.ALL_GATHER}
    for rank, number in shuffled(choose, places_of(plan, kinds)):
        device = plan.device_plans[rank]
        bucket = int(device.tasks.bucket[number])
        others = [n for n in range(len(device.buckets)) if n != bucket]
        if bucket != NONE and others:
            other = choose.choice(others)
            what = f"{name(plan, rank, number)} works on bucket {device.buckets[other].name}"
            return Mutant(plan=edited(plan, rank, number, bucket=other), what=what)
    return None


def parameter_in_no_bucket(plan: Plan, choose: random.Random) -> Mutant | None:
    """A trained parameter is neither reduced nor updated."""
    return _edit_bucket(plan, choose, add=False)


def parameter_in_two_buckets(plan: Plan, choose: random.Random) -> Mutant | None:
    """A trained parameter is updated by two buckets."""
    return _edit_bucket(plan, choose, add=True)


def _edit_bucket(plan: Plan, choose: random.Random, *, add: bool) -> Mutant | None:
    for device in shuffled(choose, plan.device_plans):
        dense = [n for n, bucket in enumerate(device.buckets) if bucket.kind != "tied" and bucket.parameters]
        for one in shuffled(choose, dense):
            parameter = choose.choice(device.buckets[one].parameters)
            others = [n for n in dense if n != one]
            if add and not others:
                continue
            place = choose.choice(others) if add else one
            names = device.buckets[place].parameters
            changed = (*names, parameter) if add else tuple(n for n in names if n != parameter)
            buckets = list(device.buckets)
            buckets[place] = replace(buckets[place], parameters=changed)
            what = (
                f"rank {device.pipeline_rank}: bucket {buckets[place].name} "
                f"{'has' if add else 'lacks'} {parameter}"
            )
            return Mutant(plan=with_device(plan, replace(device, buckets=tuple(buckets))), what=what)
    return None

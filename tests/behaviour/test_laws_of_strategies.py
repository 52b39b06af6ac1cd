"""What holds for every strategy: its plan is legal, its work is that of the model, its memory comes back."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

from cost_models.ops import Operation, OpKind
from piper.graph import PassCost
from simulator import simulate
from simulator.plan import Plan, TaskKind, Work
from simulator.plan.check import check_plan, least_memory_bytes
from simulator.timeline.attribution import attribute
from simulator.timeline.timeline import Timeline
from tests.plans import FakeCostModel, exact_price
from tests.strategies import Draft, compile_drawn, drawn

SEEDS = [
    *range(30),
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(30, 430)),
]
PASSES = {
    TaskKind.F: "forward",
    TaskKind.B: "backward",
    TaskKind.BI: "backward_inputs",
    TaskKind.BW: "backward_weights",
}


class PricedBySize(FakeCostModel):
    """A FLOP and a byte of an operation take a nanosecond each, and so does a byte that is sent."""

    def operation(self, operation: Operation):
        return exact_price(nanoseconds(operation))


def nanoseconds(operation: Operation) -> int:
    return operation.flops + operation.bytes


@lru_cache(maxsize=1)
def simulated(seed: int) -> tuple[Draft, Plan, Timeline]:
    draft = drawn(seed)
    plan = compile_drawn(draft)
    prices = PricedBySize(transfer_ns=lambda size, *_: size, collective_ns=lambda kind, size, ranks: size)
    return draft, plan, simulate(plan, prices, steps=1)


def prices_ns(plan: Plan) -> list[int]:
    """Return the price of every work."""
    return [sum(nanoseconds(one) * one.count for one in work.operations) for work in plan.works]


def matmul_flops(cost: PassCost | Work) -> int:
    """Return the FLOPs that are the model's own: plans add elementwise work, such as adding up gradients."""
    own = (OpKind.MATMUL, OpKind.GROUPED_MATMUL)
    return sum(one.flops * one.count for one in cost.operations if one.kind in own)


def cells(plan: Plan, kind: TaskKind) -> set[tuple[int, int]]:
    """Return (segment, microbatch) of all passes of a kind."""
    return {
        (segment, task.microbatch)
        for device in plan.device_plans
        for task in device.tasks
        if task.kind is kind
        for segment in range(task.first_segment, task.last_segment + 1)
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_strategy_obeys_every_law(seed: int) -> None:
    draft, plan, timeline = simulated(seed)
    assert check_plan(plan) == []
    for law in LAWS:
        law(draft, plan, timeline)


def the_work_is_that_of_the_model_whatever_the_order(draft: Draft, plan: Plan, _: Timeline) -> None:
    """Where nothing is cut: a rank then does whole matmuls."""
    if draft.tp * draft.cp > 1 or draft.meshes or any(entry["op"] == "shard" for entry in draft.directives):
        return
    tables = [device.tasks for device in plan.device_plans]
    for kind, name in PASSES.items():
        works = [work for table in tables for work in table.work[table.kind == kind].tolist()]
        costs = [
            getattr(draft.model(plan.training.micro_batch_sizes[microbatch]).segments[segment], name)
            for segment, microbatch in cells(plan, kind)
        ]
        done = sum(matmul_flops(plan.works[work]) for work in works)
        assert done == sum(matmul_flops(cost) for cost in costs), name


def every_pass_of_every_microbatch_runs_once(_: Draft, plan: Plan, __: Timeline) -> None:
    shape = (len(plan.segments), plan.training.num_microbatches)
    for kinds in ((TaskKind.F,), (TaskKind.B, TaskKind.BI), (TaskKind.B, TaskKind.BW)):
        times = np.zeros(shape, dtype=np.int64)
        for device in plan.device_plans:
            for task in device.tasks:
                if task.kind in kinds:
                    times[task.first_segment : task.last_segment + 1, task.microbatch] += 1
        assert (times == 1).all(), kinds


def ranks_are_busy_for_exactly_their_work(_: Draft, plan: Plan, timeline: Timeline) -> None:
    prices = prices_ns(plan)
    for track, device in zip(timeline.tracks, plan.device_plans, strict=True):
        table = device.tasks
        took = (track.end_ns - track.start_ns)[np.argsort(track.task)]
        computes = np.flatnonzero(table.work >= 0)
        assert took[computes].tolist() == [prices[work] for work in table.work[computes].tolist()]


def a_step_lasts_at_least_the_busiest_rank_and_the_way_of_one_microbatch(
    _: Draft, plan: Plan, timeline: Timeline
) -> None:
    makespan = max(int(track.end_ns.max()) for track in timeline.tracks)
    prices = prices_ns(plan)
    ways = np.zeros(plan.training.num_microbatches, dtype=np.int64)
    for device in plan.device_plans:
        table = device.tasks
        assert makespan >= sum(prices[work] for work in table.work.tolist() if work >= 0)
        for kind, microbatch, work in zip(table.kind, table.microbatch, table.work, strict=True):
            if kind in (TaskKind.F, TaskKind.B, TaskKind.BI) and work >= 0:
                ways[microbatch] += prices[work]
    assert makespan >= ways.max()


def memory_comes_back_and_never_falls_below_what_the_plan_needs(
    _: Draft, plan: Plan, timeline: Timeline
) -> None:
    for track, device, least in zip(
        timeline.tracks, plan.device_plans, least_memory_bytes(plan), strict=True
    ):
        total = track.memory_bytes.sum(axis=1)
        static = device.buffers.static_bytes
        assert total[-1] == static
        assert total.min() >= static
        runs = device.tasks.stream[track.task] == 0
        seen = (track.end_ns > track.start_ns)[runs].all()
        assert static <= least
        assert least <= total.max() or not seen, (
            "a task without kernels takes no time: what it holds is unseen"
        )


def every_moment_of_a_step_has_one_label(_: Draft, plan: Plan, timeline: Timeline) -> None:
    labels = attribute(plan, timeline)
    assert (labels.label_ns.sum(axis=1) == labels.end_ns - labels.begin_ns).all()


LAWS = (
    the_work_is_that_of_the_model_whatever_the_order,
    every_pass_of_every_microbatch_runs_once,
    ranks_are_busy_for_exactly_their_work,
    a_step_lasts_at_least_the_busiest_rank_and_the_way_of_one_microbatch,
    memory_comes_back_and_never_falls_below_what_the_plan_needs,
    every_moment_of_a_step_has_one_label,
)

"""Changes simulated again: never slower, and never better than the critical path allows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

import piper
from cost_models import CollectiveKind, Operation, OpKind, cluster_cost_model
from simulator import build_workload, simulate
from simulator.insight import ScaledCostModel, Scales, try_changes
from simulator.plan import TaskKind
from tests.plans import Costs, FakeCostModel, PlanBuilder, one_f_one_b_rows, pipeline_plan
from tests.random_plans import PRICES, plans

K = TaskKind


def tried(plan, prices, *, steps=1, ranks_per_node=1):
    work = build_workload(plan, prices)
    timeline = simulate(plan, prices, steps=steps, workload=work)
    found = try_changes(
        plan, prices, workload=work, timeline=timeline, node_of=lambda rank: rank // ranks_per_node
    )
    return timeline, found


@settings(max_examples=40, deadline=None)
@given(plan=plans(), prices=PRICES)
def test_a_change_gains_at_most_what_it_takes_from_the_critical_path_and_never_costs(plan, prices):
    timeline, found = tried(plan, prices)
    for what_if in found:
        assert 0 <= what_if.gain_ns <= what_if.promised_ns, what_if
        assert what_if.step_time_ns == timeline.step_time_ns - what_if.gain_ns
    assert [w.gain_ns for w in found] == sorted((w.gain_ns for w in found), reverse=True)


def test_a_link_between_nodes_helps_only_plans_whose_ranks_are_apart():
    plan = pipeline_plan(one_f_one_b_rows(2, 1), costs=Costs(forward_ns=1, backward_ns=2))
    prices = FakeCostModel(transfer_ns=lambda *_: 10)
    apart = {w.change: w.gain_ns for w in tried(plan, prices)[1]}
    together = {w.change: w.gain_ns for w in tried(plan, prices, ranks_per_node=2)[1]}
    assert apart["network between nodes 2x"] == together["links inside a node 2x"] == 10
    assert apart["pp communication 2x as fast"] == 10
    assert "links inside a node 2x" not in apart
    assert "network between nodes 2x" not in together


def test_another_path_takes_over_and_the_gain_is_less_than_the_path_promises():
    builder = PlanBuilder(pipeline_ranks=2)
    builder.devices[0].compute("a", 10, microbatch=0)
    builder.transfer(0, 1, sent_after=["a"])
    builder.devices[1].compute("other", 28, microbatch=1)
    builder.devices[1].compute("b", 5, microbatch=0, waits=["recv x"])
    _, found = tried(builder.build(), FakeCostModel(transfer_ns=lambda *_: 20))
    (message,) = [w for w in found if w.change == "pp communication 2x as fast"]
    assert (message.promised_ns, message.gain_ns) == (10, 2)


def test_what_takes_half_as_long_holds_as_large_a_share_of_links_twice_as_fast():
    inner = cluster_cost_model("dgx-h100")
    scales = Scales(inside_nodes=0.5, between_nodes=0.25, host_copies=0.5)
    scaled = ScaledCostModel(inner, scales, node_of=inner.cluster.node)
    size = 2**26

    def held(model):
        near, far, ranks = np.arange(8)[None], np.array([[0, 8]]), np.array([0])
        reduce, here = CollectiveKind.ALL_REDUCE, {"size_bytes": size, "num_ranks": 16}
        works = [
            (
                model.collective_use(reduce, members=near, **here),
                model.collective(reduce, size_bytes=size, ranks=range(8)),
            ),
            (
                model.transfer_use(pairs=far, **here),
                model.transfer(size_bytes=size, source_rank=0, target_rank=8),
            ),
            (model.host_copy_use(ranks=ranks, to_host=True, **here), model.host_copy(size_bytes=size)),
        ]
        for use, price in works:
            capacity = model.machine(16).link_bytes_per_s[use.links]
            yield (use.link_bytes / capacity / (price.seconds - use.latency_s)).max()

    assert list(held(scaled)) == pytest.approx(list(held(inner)))


def test_a_kernel_that_is_made_faster_is_so_in_all_that_bounds_it():
    inner = cluster_cost_model("dgx-h100")
    scaled = ScaledCostModel(inner, Scales(operations={OpKind.COPY: 0.5}), node_of=inner.cluster.node)
    copy = Operation(kind=OpKind.COPY, name="copy", shape=(8,), dtype="bf16", flops=0, bytes=2**30)
    assert scaled.operation_use(copy).memory_s == inner.operation_use(copy).memory_s / 2
    assert scaled.operation_use(copy).memory_bytes == 2**30


def test_changes_are_tried_with_contention_only_where_the_timeline_has_it():
    plan = piper.compile_plan("llama3-8b", "pp=4,dp=4,zero=1", cluster="dgx-h100", gpus=16)
    prices = cluster_cost_model("dgx-h100")
    alone = build_workload(plan, prices, contention=False)
    timeline = simulate(plan, prices, workload=alone)
    found = try_changes(plan, prices, workload=alone, timeline=timeline, node_of=lambda rank: rank // 8)
    assert min(what_if.gain_ns for what_if in found) >= 0

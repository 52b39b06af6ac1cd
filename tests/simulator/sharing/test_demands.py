"""What flows of real plans hold on real clusters, and what that does to them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import piper
from cost_models.models.cluster import cluster_cost_model
from piper.recipe import stack_of
from simulator import build_workload, simulate
from simulator.engines import ENGINES
from simulator.plan import TaskKind
from simulator.plan.plan import StreamRuleFacts

JOBS = [
    ("llama3-8b", "pp=4,dp=4,zero=1", 16),
    ("llama3-8b", "dp=16,zero=3", 16),
    ("mixtral-8x7b", "pp=2,dp=8,ep=8,zero=1", 16),
]


@pytest.mark.parametrize(("model", "strategy", "gpus"), JOBS)
def test_engines_agree_on_what_real_jobs_share_and_nothing_is_faster(
    model: str, strategy: str, gpus: int
) -> None:
    plan = piper.compile_plan(model, strategy, cluster="dgx-h100", gpus=gpus, global_batch=32)
    prices = cluster_cost_model("dgx-h100")
    ends = [simulate(plan, prices, engine=engine).step_end_ns.tolist() for engine in ENGINES]
    assert ends[0] == ends[1]
    alone = simulate(plan, prices, engine="fast", contention=False)
    assert alone.step_end_ns[0] < ends[0][0] < 1.2 * alone.step_end_ns[0]


def test_a_stack_can_say_that_nothing_is_shared() -> None:
    stack = stack_of("piper", settings=[("cost.contention", "off")])
    plan = piper.compile_plan("llama3-8b", "dp=8", cluster="dgx-h100", gpus=8)
    prices = cluster_cost_model("dgx-h100", stack=stack)
    assert build_workload(plan, prices).sharing is None


def test_links_that_all_flows_load_alike_are_one_and_those_that_cannot_be_full_are_none() -> None:
    plan = piper.compile_plan("llama3-8b", "pp=2,dp=16,zero=1", cluster="dgx-h100", gpus=32)
    sharing = build_workload(plan, cluster_cost_model("dgx-h100")).sharing
    assert sharing is not None
    assert 0 < sharing.num_links < 16  # of hundreds
    loads = [
        tuple(np.flatnonzero(sharing.links == link).tolist()) + tuple(sharing.uses[sharing.links == link])
        for link in range(sharing.num_links)
    ]
    assert len(set(loads)) == len(loads)


def test_a_collective_with_half_of_its_processors_moves_bytes_half_as_fast_and_leaves_the_rest() -> None:
    """24 processors keep the NVLink of 8 A100 busy; more than that make nothing faster."""
    plan = piper.compile_plan("llama3-8b", "dp=8", cluster="dgx-a100", gpus=8)
    prices = cluster_cost_model("dgx-a100")
    (device,) = plan.device_plans
    task = int(np.flatnonzero(device.tasks.kind == TaskKind.ALL_REDUCE)[0])

    def budget(sms: int) -> tuple[float, int]:
        rule = StreamRuleFacts(stream=int(device.tasks.stream[task]), sms=sms)
        work = build_workload(replace(plan, device_plans=(replace(device, stream_rules=(rule,)),)), prices)
        assert work.sharing is not None
        return float(work.prices.seconds[work.price[task]]), int(work.sharing.processors[task])

    usual, half, many = budget(24), budget(12), budget(48)
    assert (usual[1], half[1], many[1]) == (24, 12, 48)
    assert many[0] == usual[0]
    assert 1.9 * usual[0] < half[0] < 2 * usual[0]

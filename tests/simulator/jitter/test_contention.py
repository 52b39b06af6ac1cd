"""Ranks that differ share links: folded runs are met exactly, and engines agree."""

from __future__ import annotations

import random
import sys
from dataclasses import replace

import numpy as np
import pytest

import piper
from cost_models.models.cluster import cluster_cost_model
from simulator import build_workload, simulate
from simulator.engines import ENGINES, load_engine
from simulator.jitter import Sampling, parse_jitter, resolve, study, timeline_of
from simulator.jitter.contention import shared_between_ranks
from simulator.jitter.unfold import Unfolding, run_explicitly
from simulator.jitter.unfolded_run import UnfoldedRun
from simulator.jitter.units import unfolded
from simulator.plan import Plan, TaskKind
from simulator.sharing import Sharing
from tests.jitters import COLUMNS, SPECS, disturbance_of, require_same
from tests.random_sharing import random_sharing
from tests.simulator.test_engines import RandomPrices
from tests.strategies import compile_drawn, drawn

SEEDS = [*range(25), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(25, 400))]
JOBS = [
    ("llama3-8b", "pp=2,dp=8,zero=1", "a100-8gpu-200g", 16),
    ("mixtral-8x7b", "pp=2,dp=8,ep=8,zero=1", "dgx-h100", 16),
    ("llama3-8b", "pp=2,tp=2,dp=4,offload=activations", "dgx-a100", 16),
]


def run(plan: Plan, cluster: str, spec: str, *, engine: str = "fast", steps: int = 2) -> UnfoldedRun:
    prices = cluster_cost_model(cluster)
    disturbance = resolve(parse_jitter(spec) if spec else (), plan, gpus_per_node=8)
    workload, everyone = build_workload(plan, prices), unfolded(plan, disturbance)
    shared = shared_between_ranks(plan, prices, Unfolding(plan, workload, everyone))
    assert shared is not None
    return run_explicitly(
        plan, workload, everyone, disturbance=disturbance, engine=load_engine(engine), seed=5,
        max_steps=steps, shared=shared,
    )  # fmt: skip


@pytest.mark.parametrize(("model", "strategy", "cluster", "gpus"), JOBS)
def test_without_jitter_every_rank_does_what_its_device_plan_does_in_the_folded_run(
    model: str, strategy: str, cluster: str, gpus: int
) -> None:
    plan = piper.compile_plan(model, strategy, cluster=cluster, gpus=gpus, global_batch=32)
    timeline = simulate(plan, cluster_cost_model(cluster), steps=2, engine="fast")
    done = run(plan, cluster, "")
    assert done.step_end_ns.tolist() == timeline.step_end_ns.tolist()
    for track in timeline.tracks:
        device = [device.pipeline_rank for device in plan.device_plans].index(track.pipeline_rank)
        for rank in np.flatnonzero(done.units.device == device).tolist():
            for name in COLUMNS:
                np.testing.assert_array_equal(
                    getattr(done.recorded[rank], name).ravel(), getattr(track, name)
                )


@pytest.mark.parametrize("cluster", ["a100-8gpu-200g", "dgx-h100"])
@pytest.mark.parametrize("seed", SEEDS)
def test_without_jitter_the_steps_of_a_random_strategy_end_as_in_the_folded_run(
    seed: int, cluster: str
) -> None:
    plan = compile_drawn(drawn(seed), verified=False)
    timeline = simulate(plan, cluster_cost_model(cluster), steps=2, engine="fast")
    assert run(plan, cluster, "").step_end_ns.tolist() == timeline.step_end_ns.tolist()


@pytest.mark.parametrize(("model", "strategy", "cluster", "gpus"), JOBS)
def test_engines_agree_on_what_the_ranks_of_real_jobs_share(
    model: str, strategy: str, cluster: str, gpus: int
) -> None:
    plan = piper.compile_plan(model, strategy, cluster=cluster, gpus=gpus, global_batch=8)
    spec = "noise:sigma=0.1,on=all,per=rank;straggler:rank=3,factor=1.4"
    require_same(*(run(plan, cluster, spec, engine=engine, steps=1) for engine in ENGINES))


@pytest.mark.parametrize("seed", SEEDS)
def test_engines_agree_on_the_ranks_of_a_random_strategy_that_share_anything(seed: int) -> None:
    plan, choose = compile_drawn(drawn(seed), verified=False), random.Random(seed)
    prices = RandomPrices(seed)
    prices.blocking, prices.run_ahead_kernels = (), None  # with blocking calls some of these plans hang
    disturbance = disturbance_of(choose.choice(SPECS), plan)
    unfolding = Unfolding(plan, build_workload(plan, prices), unfolded(plan, disturbance))
    noisy = [unfolding.duration_ns(disturbance, seed=seed, step=step) for step in range(2)]
    workload = unfolding.workload(np.stack(noisy))
    workload = replace(workload, sharing=random_sharing(workload, choose))
    ends = [load_engine(name)(workload, max_steps=2, settled=lambda _: False) for name in ENGINES]
    for name in COLUMNS:
        np.testing.assert_array_equal(*(getattr(done, name) for done in ends))


def test_the_messages_of_all_ranks_load_an_interface_as_the_folded_message_does() -> None:
    model, strategy, cluster, gpus = JOBS[0]
    plan = piper.compile_plan(model, strategy, cluster=cluster, gpus=gpus, global_batch=32)
    prices = cluster_cost_model(cluster)
    workload, everyone = build_workload(plan, prices), unfolded(plan, disturbance_of("", plan))
    unfolding = Unfolding(plan, workload, everyone)
    shared = shared_between_ranks(plan, prices, unfolding)
    assert shared is not None
    assert workload.sharing is not None
    send = int(np.flatnonzero(plan.device_plans[0].tasks.kind == TaskKind.SEND_F)[0])
    sends = np.flatnonzero(unfolding.source == send)
    assert len(sends) == 8
    assert len({int(shared[1][task]) for task in sends}) == 8  # each a row of its own
    loads = [uses_of(shared[0], int(shared[1][task])) for task in sends]
    together = uses_of(workload.sharing, int(workload.price[send]))
    assert max(sum(load.values()) for load in loads) < 0.2
    links = {link for load in loads for link in load}
    assert max(sum(load.get(link, 0.0) for load in loads) for link in links) == pytest.approx(
        max(together.values())
    )


def uses_of(sharing: Sharing, row: int) -> dict[int, float]:
    entries = range(*sharing.link_starts[row : row + 2].tolist())
    return {int(sharing.links[entry]): float(sharing.uses[entry]) for entry in entries}


def test_the_cores_of_a_host_are_shared_by_ranks_that_are_late_too() -> None:
    plan = piper.compile_plan("tiny-llama", "dp=4", cluster="local-cpu", gpus=4, global_batch=8)
    prices = cluster_cost_model("local-cpu")
    work = build_workload(plan, prices)
    before, after = (
        study(
            plan, work, parse_jitter(spec), gpus_per_node=4, sampling=Sampling(steps=2), cost_model=prices
        ).step_ns.mean()
        for spec in ("straggler:rank=1,factor=1", "straggler:rank=1,factor=1.5")
    )
    assert before < after < 1.5 * before


def test_a_job_with_more_tasks_than_can_share_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model, strategy, cluster, gpus = JOBS[0]
    plan = piper.compile_plan(model, strategy, cluster=cluster, gpus=gpus, global_batch=8)
    prices = cluster_cost_model(cluster)
    work = build_workload(plan, prices)

    def studied():
        clauses = parse_jitter("straggler:rank=3,factor=1.2")
        return study(plan, work, clauses, gpus_per_node=8, sampling=Sampling(), cost_model=prices)

    shared = studied()
    monkeypatch.setattr(sys.modules[study.__module__], "MOST_CONTENDED", 10)
    alone = studied()
    assert (shared.contended, alone.contended) == (True, False)
    assert alone.step_ns.mean() < shared.step_ns.mean()
    warned = [any("alone" in text for text in timeline_of(plan, work, s).warnings) for s in (shared, alone)]
    assert warned == [False, True]

"""Unfolded runs give what the explicit unfolding gives in the other engines, to the nanosecond."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.catalogue import TASKS
from simulator import build_workload, simulate
from simulator.errors import IllegalPlanError
from simulator.jitter.run import run_unfolded, template_of
from simulator.jitter.units import folded
from simulator.plan import Plan
from tests.jitters import JITTERS, SPECS, disturbance_of, require_equal_to_the_oracle
from tests.plans import FakeCostModel, PlanBuilder
from tests.random_plans import PRICES, plans
from tests.simulator.test_engines import RandomPrices
from tests.strategies import compile_drawn, drawn

SEEDS = [*range(60), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(60, 1000))]
HOSTS = st.fixed_dictionaries(
    {
        "run_ahead_kernels": st.sampled_from([None, 1, 2, 3]),
        "blocking": st.lists(st.sampled_from(TASKS), max_size=2, unique=True).map(tuple),
    }
)
DRAWN = {
    "plan": plans(), "prices": PRICES, "hosts": HOSTS, "spec": JITTERS, "steps": st.integers(1, 3),
    "seed": st.integers(0, 2**40),
}  # fmt: skip


def require_equal(plan: Plan, prices: FakeCostModel, hosts: dict, **options) -> None:
    workload = build_workload(plan, replace(prices, **hosts))
    options["max_steps"] = options.pop("steps")
    require_equal_to_the_oracle(plan, workload, **options)


@settings(max_examples=150, deadline=None)
@given(**DRAWN)
def test_the_kernel_equals_the_reference_engine_on_random_plans(plan, prices, hosts, spec, steps, seed):
    require_equal(plan, prices, hosts, spec=spec, steps=steps, seed=seed)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(**DRAWN)
def test_the_kernel_equals_the_reference_engine_on_many_random_plans(plan, prices, hosts, spec, steps, seed):
    require_equal(plan, prices, hosts, spec=spec, steps=steps, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_kernel_equals_the_fast_engine_on_a_random_strategy(seed: int) -> None:
    plan, choose = compile_drawn(drawn(seed), verified=False), random.Random(seed)
    workload = build_workload(plan, RandomPrices(seed))
    require_equal_to_the_oracle(
        plan,
        workload,
        spec=choose.choice(SPECS),
        engine="fast",
        seed=seed,
        max_steps=choose.choice([1, 2, 3]),
    )


def never_hanging(prices: RandomPrices) -> RandomPrices:
    """Let hosts await nothing: with blocking calls or short queues some of these plans hang."""
    prices.blocking, prices.run_ahead_kernels = (), None
    return prices


@pytest.mark.parametrize("seed", range(25))
def test_without_jitter_every_rank_does_what_its_device_plan_does_in_the_folded_run(seed: int) -> None:
    plan = compile_drawn(drawn(seed), verified=False)
    prices = RandomPrices(seed)
    never_hanging(prices)
    workload = build_workload(plan, prices)
    timeline = simulate(plan, prices, steps=2, engine="reference", workload=workload)
    disturbance = disturbance_of("", plan)
    units = folded(plan, disturbance)
    assert units.num_units <= len(plan.device_plans)
    record = list(range(units.num_units))
    run = run_unfolded(template_of(plan, workload), units, disturbance, seed=seed, max_steps=2, record=record)
    assert run.step_end_ns.tolist() == timeline.step_end_ns.tolist()
    for track in timeline.tracks:
        times = run.recorded[int(units.of_rank[track.rank])]
        for name in ("dispatch_ns", "ready_ns", "start_ns", "end_ns"):
            np.testing.assert_array_equal(getattr(times, name).ravel(), getattr(track, name))


def test_only_what_is_asked_for_is_recorded_and_nothing_else_changes() -> None:
    plan = compile_drawn(drawn(7), verified=False)
    template = template_of(plan, build_workload(plan, never_hanging(RandomPrices(7))))
    disturbance = disturbance_of("noise:sigma=0.3,per=rank", plan)
    units = folded(plan, disturbance)
    last = units.num_units - 1
    runs = [
        run_unfolded(template, units, disturbance, seed=1, max_steps=3, record=record)
        for record in ([], [last], range(units.num_units))
    ]
    assert [sorted(run.recorded) for run in runs] == [[], [last], list(range(units.num_units))]
    assert len({tuple(run.step_end_ns.tolist()) for run in runs}) == 1
    np.testing.assert_array_equal(runs[1].recorded[last].end_ns, runs[2].recorded[last].end_ns)


def test_a_run_stops_when_its_steps_have_settled() -> None:
    plan = compile_drawn(drawn(3), verified=False)
    template = template_of(plan, build_workload(plan, RandomPrices(3)))
    disturbance = disturbance_of("straggler:rank=0,factor=2", plan)
    run = run_unfolded(
        template, folded(plan, disturbance), disturbance, seed=0, max_steps=9,
        settled=lambda ends: len(ends) == 2,
    )  # fmt: skip
    assert len(run.step_end_ns) == len(run.unit_end_ns) == 2


def test_a_plan_that_hangs_is_reported_in_the_words_of_the_engines() -> None:
    builder = PlanBuilder(pipeline_ranks=1, replicas=2)
    builder.devices[0].compute("a", 1, microbatch=0)
    builder.devices[0].compute("b", 1, microbatch=1)
    builder.devices[0].wait_later("a", for_whom="b")
    plan = builder.build()
    disturbance = disturbance_of("straggler:rank=1,factor=2", plan)
    template = template_of(plan, build_workload(plan, FakeCostModel()))
    with pytest.raises(IllegalPlanError) as caught:
        run_unfolded(template, folded(plan, disturbance), disturbance, seed=0, max_steps=1)
    assert "0F0 of pipeline rank 0 waits for 0F1" in caught.value.violations[0]

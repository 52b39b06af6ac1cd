"""Laws of plans that random strategies make, over all directives; `test_laws` has those of random plans.

What the plans themselves must obey (work of the model, memory that comes back) is in
`tests/behaviour/test_laws_of_strategies.py`.
"""

from __future__ import annotations

import json
import random
from functools import lru_cache
from typing import Any

import pytest

from cost_models import cluster_cost_model
from cost_models.errors import InputError
from simulator import build_workload, simulate, summarize
from simulator.engines import ENGINES
from simulator.errors import IllegalPlanError
from simulator.plan import Plan
from tests.mutations.table import MUTATIONS
from tests.plans import FakeCostModel, exact_price
from tests.strategies import compile_drawn, drawn

SEEDS = [*range(500, 530), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(530, 1000))]


@lru_cache(maxsize=1)
def plan_of(seed: int) -> Plan:
    return compile_drawn(drawn(seed), verified=False)


def result_on_a_cluster(plan: Plan, *, engine: str) -> dict[str, Any]:
    prices = cluster_cost_model("dgx-h100")
    workload = build_workload(plan, prices)
    timeline = simulate(plan, prices, workload=workload, engine=engine)
    return summarize(plan, timeline, prices, workload=workload)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_figures_of_a_strategy_add_up_and_come_out_the_same_twice_and_in_every_engine(seed: int) -> None:
    plan = plan_of(seed)
    found = [result_on_a_cluster(plan, engine=engine) for engine in (*ENGINES, *ENGINES)]
    assert len({json.dumps(result) for result in found}) == 1
    result = found[0]
    step_s = result["step_time_s"]
    assert sum(result["breakdown_s"].values()) == pytest.approx(step_s, rel=1e-9)
    assert min(result["breakdown_s"].values()) >= 0
    assert result["mfu"] <= result["hfu"] * (1 + 1e-12)
    assert 0 <= result["mfu"] <= 1
    assert result["error_band"]["step_time_low_s"] <= step_s <= result["error_band"]["step_time_high_s"]
    for rank in result["ranks"]:
        assert rank["busy_s"] <= step_s * (1 + 1e-9)
        assert sum(rank["memory_by_class_bytes"].values()) == rank["peak_memory_bytes"]


class Slower(FakeCostModel):
    """Small whole prices of a seed; links take `more` ns longer for a message, a collective, a copy."""

    def __init__(self, seed: int, *, more: int = 0, launch_ns: int = 0) -> None:
        choose = random.Random(seed)
        super().__init__(
            launch_ns=launch_ns,
            run_ahead_kernels=choose.choice([None, None, 2, 20]),
            eager_limit_bytes=choose.choice([0, 100, 10**9]),
            transfer_ns=lambda size, *_: size % 7 + more,
            collective_ns=lambda kind, size, ranks: size % 11 + more,
            host_copy_ns=lambda size: size % 5 + more,
        )

    def operation(self, operation: Any) -> Any:
        return exact_price(operation.flops % 13)


@pytest.mark.parametrize("seed", SEEDS)
def test_more_bandwidth_or_less_launch_cost_never_slows_a_strategy(seed: int) -> None:
    plan = plan_of(seed)
    times = [
        simulate(plan, Slower(seed, more=more, launch_ns=launch_ns), steps=2).step_end_ns.tolist()
        for more, launch_ns in ((0, 0), (0, 1), (3, 1), (3, 4))
    ]
    for step in range(2):
        ends = [ends[step] for ends in times]
        assert ends == sorted(ends)


@pytest.mark.parametrize("kind", MUTATIONS)
def test_a_broken_plan_ends_or_says_what_is_wrong_or_who_waits_for_whom(kind: str) -> None:
    choose = random.Random(kind)
    mutants = (MUTATIONS[kind](compile_drawn(drawn(seed), verified=False), choose) for seed in range(200))
    broken = next(found for found in mutants if found is not None)
    said = [what_is_said(broken.plan, engine=engine) for engine in ENGINES]
    assert len({str(one) for one in said}) == 1, broken.what
    for error in said:
        if isinstance(error, IllegalPlanError):
            assert error.exit_code == 4
            assert error.violations
            assert "hangs" not in error.where or all(" waits for " in text for text in error.violations)


def what_is_said(plan: Plan, *, engine: str) -> object:
    """Return the rows of a timeline, or what is wrong with the plan."""
    try:
        return simulate(plan, Slower(1, more=2, launch_ns=1), steps=2, engine=engine).rows()
    except InputError as error:
        return error

"""Whatever directives state together, the plan is legal, reads back equal, and runs to its end."""

from __future__ import annotations

import pytest

from cost_models.ops import Operation
from cost_models.price import Price
from piper.compiler.compile import emit_plan
from simulator import simulate
from simulator.plan.check import check_plan
from simulator.plan.codec import bytes_to_plan, plan_to_bytes
from tests.graphs import after
from tests.plans import FakeCostModel, exact_price
from tests.random_facts import random_graph


class ByFlops(FakeCostModel):
    """One ns per 100 FLOPs, and one more."""

    def operation(self, operation: Operation) -> Price:
        return exact_price(1 + operation.flops // 100)


@pytest.mark.parametrize("seed", range(60))
def test_random_facts_make_a_legal_plan_that_ends(seed: int) -> None:
    plan = emit_plan(after(random_graph(seed), "check_order"), [], strategy=f"seed {seed}")
    assert [str(violation) for violation in check_plan(plan)] == []
    for device in plan.device_plans:
        codes = device.codes()
        assert sorted(set(codes)) == sorted(codes)
    data = plan_to_bytes(plan)
    assert plan_to_bytes(bytes_to_plan(data)) == data
    assert len(simulate(plan, ByFlops(), steps=2).rows()) > 0

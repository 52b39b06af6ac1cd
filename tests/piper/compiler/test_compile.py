"""Every kind of shorthand compiles to a legal plan."""

from __future__ import annotations

import pytest

from simulator.plan.check import check_plan
from tests.jobs import compiled


@pytest.mark.parametrize(
    "text",
    [
        "dp=2,zero=2", "dp=2,zero=3", "dp=2,bucket_mb=25", "dp=4,zero=1,hsdp=2", "pp=2,schedule=zb_h1",
        "recompute=selective", "offload=optimizer", "pp=2,dp=2,zero=3,schedule=zbv",
    ],
)  # fmt: skip
def test_a_shorthand_compiles_to_a_legal_plan(text: str) -> None:
    assert check_plan(compiled(text, gpus=None, global_batch=8)) == []


def test_parameters_on_the_host_come_back_unit_by_unit() -> None:
    plan = compiled("offload=params", layers=4, global_batch=2, gpus=1)
    reloads = [code for code in plan.device_plans[0].codes() if code.startswith("0RELOAD:F0")]
    assert len(reloads) == len(plan.device_plans[0].buckets) > 1

"""DualPipe from a shorthand to a plan: two pipeline ranks hold each stage, and sum its gradients."""

from __future__ import annotations

import pytest

from simulator.plan.check import check_plan
from tests.jobs import compiled


@pytest.mark.parametrize("text", ["pp=4,schedule=dualpipe", "pp=2,dp=2,zero=3,schedule=dualpipe"])
def test_the_plan_is_legal(text: str) -> None:
    assert check_plan(compiled(text, global_batch=16)) == []


def test_ranks_that_face_each_other_hold_the_same_stages() -> None:
    plan = compiled("pp=4,schedule=dualpipe", global_batch=16)
    assert [device.stages for device in plan.device_plans] == [(0, 3), (1, 2), (1, 2), (0, 3)]


def test_half_of_the_microbatches_go_each_way() -> None:
    plan = compiled("pp=4,schedule=dualpipe", global_batch=16)
    first, last = plan.device_plans[0].codes(), plan.device_plans[3].codes()
    assert {f"0F{m}" for m in range(8)} <= set(first)
    assert {f"0F{m}" for m in range(8, 16)} <= set(last)


def test_gradients_of_a_stage_are_summed_over_both_holders() -> None:
    plan = compiled("pp=4,schedule=dualpipe", global_batch=16)
    sums = [group for group in plan.groups if group.name.startswith("tied")]
    assert [group.pipeline_ranks for group in sums] == [(0, 3), (1, 2)]

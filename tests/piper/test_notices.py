"""What a plan tells its user unasked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piper.predict import Job, compile_resolved
from piper.strategy import Strategy, resolve
from simulator.plan import Parameter
from tests.models import captured


def test_a_parameter_that_forward_never_uses_is_named() -> None:
    model = captured(layers=2)
    idle = replace(model, parameters=(*model.parameters, Parameter(name="idle.weight", shape=(4,))))
    strategy = Strategy.parse("pp=1,dp=1")
    resolved = resolve(strategy, gpus=1, gpus_per_node=8, global_batch=1, micro_batch=1)
    plan = compile_resolved(resolved, [idle], Job(model="toy", strategy=strategy))
    assert any("idle.weight" in notice for notice in plan.notices)
    assert compile_resolved(resolved, [model], Job(model="toy", strategy=strategy)).notices == ()


@pytest.mark.parametrize("zero", [0, 1])
def test_zero_over_one_replica_is_said(zero: int) -> None:
    strategy = Strategy.parse(f"pp=1,dp=1,zero={zero}")
    resolved = resolve(strategy, gpus=1, gpus_per_node=8, global_batch=1, micro_batch=1)
    assert bool(resolved.notices) is (zero == 1)

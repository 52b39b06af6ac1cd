"""What a plan tells its user unasked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from piper.predict import Job, compile_job, compile_resolved
from piper.strategy import Strategy, load_strategy, resolve
from simulator.plan import Parameter
from tests.models import captured
from tests.tiny_configs import TINY


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


def test_what_a_config_has_and_the_plan_has_not_is_said_with_the_plan(tmp_path: Path) -> None:
    config = TINY["qwen3"] | {"vision_config": {"depth": 2}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = compile_job(Job(model=str(tmp_path), strategy=load_strategy("pp=2"), gpus=2)).plan
    assert plan.notices == ("vision tower not planned: its parameters are not counted",)

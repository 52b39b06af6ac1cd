"""The ten lowering checks of the published system's specification (section 7.1), with our answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from piper.errors import StrategyError
from simulator import simulate
from simulator.errors import IllegalPlanError
from simulator.plan import Plan, TaskKind
from simulator.plan.check import check_plan
from simulator.plan.checks import CHECKS, Facts
from tests.jobs import compiled
from tests.piper.runtime.jobs import plan_of, train
from tests.plans import FakeCostModel, PlanBuilder

K = TaskKind


def written(tmp_path: Path, *entries: dict[str, Any]) -> str:
    path = tmp_path / "strategy.json"
    path.write_text(json.dumps(entries))
    return str(path)


def slot(stage: int, microbatch: int, letter: str) -> list[dict[str, object]]:
    return [{"PP": stage, "MB": microbatch, "PASS": letter}]


def test_5_a_pipeline_without_order_gets_a_default_order(tmp_path: Path) -> None:
    stated = compiled("pp=2,dp=1,schedule=1f1b", global_batch=4)
    plan = compiled(written(tmp_path, {"op": "mesh", "axes": {"pp": 2, "dp": 1}}), global_batch=4)
    assert check_plan(plan) == []
    assert [device.codes() for device in plan.device_plans] == [
        device.codes() for device in stated.device_plans
    ]


def test_7_an_order_row_that_names_a_stage_of_another_rank_crosses_device_placement(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"op": "mesh", "axes": {"pp": 2, "dp": 1}},
        {"op": "split", "num_microbatches": 2},
        {"op": "order", "filters": [slot(0, 0, "F"), slot(1, 0, "F")]},
    )
    with pytest.raises(StrategyError, match="crosses device placement"):
        compiled(path, global_batch=2)


def test_8_a_backward_ordered_before_its_forward_is_a_cycle(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"op": "mesh", "axes": {"pp": 1, "dp": 1}},
        {"op": "split", "num_microbatches": 1},
        {"op": "order", "filters": [slot(0, 0, "B"), slot(0, 0, "F")]},
    )
    found = [
        violation for violation in check_plan(compiled(path, global_batch=1)) if violation.rule == "cycle"
    ]
    assert [violation.message for violation in found] == [
        "rank 0: 0B0 needs the result of rank 0: 0F0, which comes after it: a cycle 0B0 -> 0F0 -> 0B0"
    ]
    assert found[0].directives == (f"order ({path}:1)",)


def test_9_two_replicas_with_several_microbatches_take_the_mean_of_all_samples() -> None:
    result = train(plan_of("dp=2", global_batch=6, micro_batch=1), steps=1).result
    assert result["max_relative_error"]["gradients"] == 0.0
    assert result["whole_batch_error"]["gradients"] < 1e-5


def one_stream_per_rank() -> Plan:
    """Two stages in 1F1B, two microbatches; all transfers of a rank on one stream, sends first."""
    builder = PlanBuilder(pipeline_ranks=2)
    below, above = builder.devices
    moved = {"size_bytes": 100, "edge": 0}
    for number in (0, 1):
        below.compute(f"F{number}", 1, K.F, microbatch=number)
        below.task(
            f"send {number}", K.SEND_F, "p2p", peer=1, microbatch=number, waits=[f"F{number}"], **moved
        )
    below.task("recv 0", K.RECV_B, "p2p", peer=1, microbatch=0, **moved)
    below.compute("B0", 1, K.B, microbatch=0, waits=["recv 0"])
    above.task("recv 0", K.RECV_F, "p2p", peer=0, microbatch=0, **moved)
    above.compute("F0", 1, K.F, microbatch=0, waits=["recv 0"])
    above.compute("B0", 1, K.B, microbatch=0)
    above.task("send 0", K.SEND_B, "p2p", peer=0, microbatch=0, waits=["B0"], **moved)
    above.task("recv 1", K.RECV_F, "p2p", peer=0, microbatch=1, **moved)
    above.compute("F1", 1, K.F, microbatch=1, waits=["recv 1"])
    return builder.build()


def test_10_messages_above_the_eager_limit_on_one_stream_wait_in_a_circle() -> None:
    plan = one_stream_per_rank()
    small = simulate(plan, FakeCostModel(eager_limit_bytes=100), steps=1)
    assert all(len(track.task) == len(device.tasks) for track, device in zip(
        small.tracks, plan.device_plans, strict=True
    ))  # fmt: skip
    with pytest.raises(IllegalPlanError, match="SEND_F1") as caught:
        simulate(plan, FakeCostModel(eager_limit_bytes=99), steps=1)
    assert "SEND_B0" in str(caught.value)
    circle = CHECKS["rendezvous"](Facts.of(plan))
    assert {"rank 0: 0SEND_F1", "rank 1: 1SEND_B0"} <= set(circle[0].tasks)

"""The ten lowering checks of the published system's specification (section 7.1), with our answers."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from piper.errors import StrategyError
from piper.schedules import schedule_rows
from simulator import simulate
from simulator.errors import IllegalPlanError
from simulator.plan import Plan, TaskKind
from simulator.plan.check import check_plan
from simulator.plan.checks import CHECKS, Facts
from tests.jobs import compiled
from tests.piper.runtime.jobs import plan_of, train
from tests.plans import FakeCostModel, PlanBuilder
from tests.strategies import Draft, compile_drawn

K = TaskKind


def written(tmp_path: Path, *entries: dict[str, Any]) -> str:
    path = tmp_path / "strategy.json"
    path.write_text(json.dumps(entries))
    return str(path)


def slot(stage: int, microbatch: int, letter: str) -> list[dict[str, object]]:
    return [{"PP": stage, "MB": microbatch, "PASS": letter}]


def lowered(*directives: dict[str, Any], **job: Any) -> Plan:
    """Compile a hand-made model; the plan is legal."""
    plan = compile_drawn(Draft(choose=Random(0), clip=None, directives=list(directives), **job))
    assert check_plan(plan) == []
    return plan


def codes(plan: Plan, rank: int, *kinds: TaskKind) -> list[str]:
    device = plan.device_plans[rank]
    pairs = zip(device.codes(), device.tasks.kind.tolist(), strict=True)
    return [code for code, kind in pairs if kind in (kinds or tuple(K))]


def test_1_zero_3_gathers_each_unit_for_forward_and_backward_and_the_last_one_once() -> None:
    """Nine units on a group of two ranks: the last backward follows its forward, and needs no gather."""
    stages = ({"op": "place", "filter": {"PP": stage}, "devices": [0, 1]} for stage in range(3))
    state = {"shard_params": True, "shard_grads": True, "devices": [0, 1]}
    plan = lowered(
        *stages,
        {"op": "split", "num_microbatches": 1},
        {"op": "replicate", "filter": {"PP": "*"}, **state},
        layers=7, dp=2, global_batch=2,
    )  # fmt: skip
    gathers = codes(plan, 0, K.ALL_GATHER)
    assert sum(":F0" in code for code in gathers) == 9
    assert sum(":B0" in code for code in gathers) == 8
    assert not any(code.endswith(":B0/8@dense2n2") for code in gathers)
    assert len(codes(plan, 0, K.REDUCE_SCATTER)) == 9


TP_REGION = {"op": "shard_tensor", "sequence_parallel": False}


def test_2_a_region_inside_a_stage_gets_two_collectives() -> None:
    """Segments that no collective separates are one task: seven tasks in place of the nine nodes of 7.1."""
    plan = lowered(
        {"op": "mesh", "axes": {"tp": 2}},
        {"op": "split", "num_microbatches": 1},
        {**TP_REGION, "filter": {"TP": 1}},
        regions="dense", layers=1,
    )  # fmt: skip
    assert codes(plan, 0) == [
        "0F0/0", "0ALL_REDUCE:F0/7", "0F0/7", "0B0/6", "0ALL_REDUCE:B0/6", "0B0/0", "0UPDATE@dense0",
    ]  # fmt: skip


def test_3_two_stages_of_two_tensor_ranks_run_every_task_of_four_microbatches() -> None:
    """7.1 has 12 F, 12 B, 4 sends, 4 receives, 8 collectives, an update; two of three F and B join here."""
    plan = lowered(
        {"op": "mesh", "axes": {"pp": 2, "tp": 2}},
        {"op": "split", "num_microbatches": 4},
        {**TP_REGION, "filter": {"TP": [1, 3]}},
        {"op": "order", "schedule": "1f1b"},
        regions="dense", layers=2, global_batch=4,
    )  # fmt: skip
    for rank in (0, 1):
        counts = [
            len(codes(plan, rank, *kinds))
            for kinds in (
                (K.F,), (K.B,), (K.SEND_F, K.SEND_B), (K.RECV_F, K.RECV_B), (K.ALL_REDUCE,), (K.UPDATE,)
            )
        ]  # fmt: skip
        assert counts == [8, 8, 4, 4, 8, 1]


EXPERTS = {"op": "shard", "filter": {"EP": "*"}}


def test_4_experts_may_be_cut_when_axes_are_named_and_no_axis_is_claimed_twice() -> None:
    """Refused upstream altogether; here experts are cut over etp, the ranks that share an expert."""
    mesh = {"op": "mesh", "axes": {"tp": 2, "dp": 2, "ep": 2, "etp": 2}}
    rest = ({"op": "replicate", "filter": {}}, {"op": "shard_tensor", "filter": {"TP": "*"}})
    cut = {"op": "shard_tensor", "filter": {"EP": "*"}}
    job = {"regions": "experts", "layers": 1, "dp": 2, "global_batch": 2}
    assert codes(lowered(mesh, *rest, EXPERTS, {**cut, "axis": "etp"}, **job), 0, K.ALL_TO_ALL)
    for both in ((EXPERTS, cut), (cut, EXPERTS)):
        with pytest.raises(StrategyError, match="distributes over ranks of the same axes"):
            lowered(mesh, *rest, *both, **job)


def test_5_a_pipeline_without_order_gets_a_default_order(tmp_path: Path) -> None:
    stated = compiled("pp=2,dp=1,schedule=1f1b", global_batch=4)
    plan = compiled(written(tmp_path, {"op": "mesh", "axes": {"pp": 2, "dp": 1}}), global_batch=4)
    assert check_plan(plan) == []
    assert [device.codes() for device in plan.device_plans] == [
        device.codes() for device in stated.device_plans
    ]


def test_6_dualpipe_v_takes_no_fewer_microbatches_than_stages_and_runs_each_pass_once() -> None:
    ask = {"num_pipeline_ranks": 2, "virtual_stages_per_rank": 2}
    with pytest.raises(StrategyError, match="dualpipe_v"):
        schedule_rows("dualpipe_v", num_microbatches=3, **ask)
    rows = schedule_rows("dualpipe_v", num_microbatches=4, **ask)
    for kinds in ((K.F,), (K.B, K.BI), (K.B, K.BW)):
        listed = sorted(
            (task.stage, task.microbatch)
            for row in rows
            for slot in row
            for task in slot
            if task.kind in kinds
        )
        assert listed == [(stage, microbatch) for stage in range(4) for microbatch in range(4)]
    assert check_plan(compiled("pp=2,dp=1,schedule=dualpipe_v", global_batch=4)) == []


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

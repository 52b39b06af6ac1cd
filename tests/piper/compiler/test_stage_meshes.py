"""Plans of stages with meshes of their own: state, experts and figures of a job follow each stage's mesh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cost_models.ops import Operation
from cost_models.price import Price
from piper.errors import StrategyError
from piper.graph import CapturedModel
from simulator import simulate, summarize
from simulator.plan import Plan, TaskKind
from simulator.plan.check import check_plan
from simulator.plan.codec import bytes_to_plan, plan_to_bytes
from tests.graphs import transformer
from tests.jobs import compiled
from tests.plans import FakeCostModel, exact_price


class PricedByFlops(FakeCostModel):
    """A FLOP takes a nanosecond."""

    def operation(self, operation: Operation) -> Price:
        return exact_price(operation.flops)


SPLIT = {"op": "split", "filter": {}, "micro_batch": 4}
CUT = {"op": "shard_tensor", "filter": {"TP": "*"}}


def plan_of(folder: Path, *entries: dict[str, Any], experts: bool = False) -> Plan:
    path = folder / "strategy.json"
    path.write_text(json.dumps(entries))

    def model(micro_batch: int) -> CapturedModel:
        return transformer(layers=6, micro_batch=micro_batch, experts=experts)

    return compiled(str(path), model=model, global_batch=64)


def mesh(stage: int | None = None, **axes: int) -> dict[str, Any]:
    return {"op": "mesh", "axes": axes} | ({} if stage is None else {"filter": {"PP": stage}})


def shards(plan: Plan) -> list[dict[str, int]]:
    return [{bucket.kind: bucket.shard_count for bucket in device.buckets} for device in plan.device_plans]


def zero3(**fields: int) -> dict[str, Any]:
    return {"op": "replicate", "filter": {"PP": "*"}, "shard_params": True, **fields}


def test_state_is_cut_over_the_replicas_of_each_stage(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, mesh(pp=2, tp=2, dp=4), mesh(1, tp=4, dp=2), SPLIT, CUT, zero3())
    assert check_plan(plan) == []
    assert [found["dense"] for found in shards(plan)] == [4, 2]


def test_a_stage_may_say_over_how_many_ranks_its_state_is_cut(tmp_path: Path) -> None:
    hybrid = mesh(1, tp=1, dp_replicate=4, dp_shard=2)
    plan = plan_of(tmp_path, mesh(pp=2, tp=2, dp_replicate=2, dp_shard=2), hybrid, SPLIT, CUT, zero3())
    assert check_plan(plan) == []
    assert [found["dense"] for found in shards(plan)] == [2, 2]
    plan = plan_of(tmp_path, mesh(pp=2, dp=8), mesh(1, dp_replicate=2, dp_shard=4), SPLIT, zero3())
    assert [found["dense"] for found in shards(plan)] == [8, 4]
    assert {device.mesh for device in plan.device_plans} == {None}


def test_shards_of_the_job_hold_for_a_stage_that_says_nothing_else(tmp_path: Path) -> None:
    stage = mesh(1, tp=1, dp=8)
    plan = plan_of(tmp_path, mesh(pp=2, tp=2, dp_replicate=2, dp_shard=2), stage, SPLIT, CUT, zero3())
    assert [found["dense"] for found in shards(plan)] == [2, 2]


def test_stages_may_distribute_experts_over_other_numbers_of_ranks(tmp_path: Path) -> None:
    replicate = {"op": "replicate", "filter": {"PP": "*"}}
    shard = {"op": "shard", "filter": {"EP": "*"}}
    plan = plan_of(
        tmp_path, mesh(pp=2, dp=8, ep=2), mesh(1, dp=8, ep=4), SPLIT, replicate, shard, experts=True
    )
    assert check_plan(plan) == []
    sizes = {group.pipeline_ranks: group.size for group in plan.groups if group.axis == "ep"}
    assert sizes == {(0,): 2, (1,): 4}


def test_a_stage_may_keep_its_experts_whole(tmp_path: Path) -> None:
    replicate = {"op": "replicate", "filter": {"PP": "*"}}
    shard = {"op": "shard", "filter": {"EP": "*"}}
    plan = plan_of(
        tmp_path, mesh(pp=2, dp=8, ep=2), mesh(1, dp=8, ep=1), SPLIT, replicate, shard, experts=True
    )
    assert check_plan(plan) == []
    kinds = [set(device.tasks.kind.tolist()) for device in plan.device_plans]
    assert [TaskKind.ALL_TO_ALL in found for found in kinds] == [True, False]


@pytest.fixture(params=[True, False], ids=["sequence_parallel", "whole_tokens"])
def unlike(request: pytest.FixtureRequest, tmp_path: Path) -> Plan:
    cut = CUT | {"sequence_parallel": request.param}
    return plan_of(tmp_path, mesh(pp=2, tp=2, dp=4), mesh(1, tp=4, dp=2), SPLIT, cut, zero3())


def test_the_job_counts_its_samples_and_ranks_once(unlike: Plan, tmp_path: Path) -> None:
    like = plan_of(tmp_path, mesh(pp=2, tp=2, dp=4), SPLIT, CUT, zero3())
    assert (unlike.training, unlike.num_ranks, unlike.replicas) == (like.training, 16, 8)
    results = [summarize(plan, simulate(plan, PricedByFlops()), PricedByFlops()) for plan in (unlike, like)]
    for key in ("model_flops_per_step", "n_gpus"):
        assert results[0][key] == results[1][key]
    assert [rank["n_devices"] for rank in results[0]["ranks"]] == [8, 8]
    tokens = [result["tokens_per_s"] * result["step_time_s"] for result in results]
    assert tokens[0] == pytest.approx(tokens[1]) == pytest.approx(64 * 8)


def test_the_file_says_the_mesh_of_a_device_and_reads_back_equal(unlike: Plan) -> None:
    data = plan_to_bytes(unlike)
    document = json.loads(data)
    assert [device["mesh"] for device in document["device_plans"]] == [
        None,
        {"axes": [["tp", 4], ["cp", 1], ["dp", 2]]},
    ]
    assert plan_to_bytes(bytes_to_plan(data)) == data


def test_time_of_regrouping_is_pipeline_communication(unlike: Plan) -> None:
    def exposed_s(collective_ns: int) -> float:
        prices = PricedByFlops(collective_ns=lambda kind, size, ranks: collective_ns)
        return float(
            summarize(unlike, simulate(unlike, prices, steps=1), prices)["breakdown_s"]["exposed_pp"]
        )

    assert exposed_s(10**6) > exposed_s(0)


def lists(cut: dict[str, Any], replicate: dict[str, Any]) -> list[dict[str, Any]]:
    places = [
        {"op": "place", "filter": {"PP": stage}, "devices": [2 * stage, 2 * stage + 1]} for stage in (0, 1)
    ]
    return [*places, {"op": "shard_tensor", "filter": {"TP": "*"}} | cut, zero3() | replicate, SPLIT]


@pytest.mark.parametrize("cut", [{"devices": [0, 1]}, {"filter": {"TP": "*", "PP": 0}}])
def test_device_lists_may_be_cut_in_one_stage_and_replicated_in_another(
    cut: dict[str, Any], tmp_path: Path
) -> None:
    plan = plan_of(tmp_path, *lists(cut, {"filter": {"PP": 1}, "devices": [2, 3]}))
    assert check_plan(plan) == []
    assert [plan.axis_size("tp", pipeline_rank=rank) for rank in (0, 1)] == [2, 1]
    assert [found["dense"] for found in shards(plan)] == [1, 2]


def test_device_lists_that_a_cut_names_all_are_ranks_of_one_axis(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, *lists({}, {}))
    assert check_plan(plan) == []
    assert [plan.axis_size("tp", pipeline_rank=rank) for rank in (0, 1)] == [2, 2]


def test_a_place_names_the_whole_axis_as_its_stage_has_it(tmp_path: Path) -> None:
    def placed(tp: str) -> Plan:
        places = [
            {"op": "place", "filter": {"PP": stage}, "at": {"pp": stage, "tp": text}}
            for stage, text in enumerate(("0-1", tp))
        ]
        return plan_of(tmp_path, mesh(pp=2, tp=2, dp=4), mesh(1, tp=4, dp=2), *places, SPLIT, CUT, zero3())

    assert check_plan(placed("0-3")) == []
    with pytest.raises(StrategyError, match="which has the positions 0-3"):
        placed("0-1")

"""Every key of the shorthand: the directives it means, and the same plan from a file of these directives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from piper.errors import StrategyError
from piper.graph import CapturedModel
from piper.strategy import write_directives
from simulator.plan import Plan
from simulator.plan.check import check_plan
from simulator.plan.codec import plan_to_bytes
from tests.graphs import transformer
from tests.jobs import compiled


def dense(micro_batch: int) -> CapturedModel:
    return transformer(layers=6, micro_batch=micro_batch)


def sparse(micro_batch: int) -> CapturedModel:
    return transformer(layers=6, micro_batch=micro_batch, experts=True)


def plan_of(text: str, **job: Any) -> Plan:
    return compiled(text, model=sparse if "ep=" in text else dense, **job)


def entries(plan: Plan, op: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in d.items() if k != "op"} for d in plan.directives if d["op"] == op]


@pytest.mark.parametrize(
    ("text", "op", "fields"),
    [
        ("tp=2,dp=2", "mesh", {"axes": {"tp": 2, "dp": 2, "pp": 1}}),
        ("cp=2,pp=2,dp=2", "mesh", {"axes": {"cp": 2, "dp": 2, "pp": 2}}),
        ("dp=2", "replicate", {"filter": {"PP": "*"}}),
        ("dp=2,zero=0", "replicate", {"filter": {"PP": "*"}}),
        ("dp=2,zero=1", "replicate", {"filter": {"PP": "*"}, "shard_optimizer": True}),
        (
            "dp=2,zero=2",
            "replicate",
            {"filter": {"PP": "*"}, "shard_optimizer": True, "shard_grads": True},
        ),
        (
            "dp=4,zero=3,hsdp=2,prefetch=2,bucket_mb=25",
            "replicate",
            {
                "filter": {"PP": "*"}, "shard_optimizer": True, "shard_grads": True, "shard_params": True,
                "shard_ranks": 2, "bucket_mb": 25, "prefetch": 2,
            },
        ),
        ("tp=2", "shard_tensor", {"filter": {"TP": "*"}}),
        ("tp=2,sp=on", "shard_tensor", {"filter": {"TP": "*"}}),
        ("tp=2,sp=off", "shard_tensor", {"filter": {"TP": "*"}, "sequence_parallel": False}),
        ("tp=2,async_tp=on", "shard_tensor", {"filter": {"TP": "*"}, "asynchronous": True}),
        ("cp=2", "shard_sequence", {"filter": {"CP": "*"}}),
        ("ep=2,dp=2", "shard", {"filter": {"EP": "*"}, "degree": 2, "tensor_degree": 1}),
        ("ep=2,etp=2,tp=2,dp=2", "shard", {"filter": {"EP": "*"}, "degree": 2, "tensor_degree": 2}),
        ("recompute=full", "recompute", {"filter": {"LAYER": "*"}}),
        ("recompute=full:2", "recompute", {"filter": {"LAYER": "*"}, "layers": 2}),
        (
            "recompute=selective",
            "recompute",
            {"filter": {"LAYER": "*"}, "mode": "selective", "ops": ["attention", "softmax"]},
        ),
        ("dp=2,offload=optimizer", "offload", {"filter": {"PP": "*"}, "what": "optimizer"}),
        ("offload=activations", "offload", {"filter": {"PP": "*"}, "what": "activations"}),
        ("offload=params", "offload", {"filter": {"PP": "*"}, "what": "params"}),
        ("micro_batch=2", "split", {"filter": {}, "dim_name": "MB", "micro_batch": 2}),
        ("pp=2,schedule=gpipe", "order", {"schedule": "gpipe"}),
        ("pp=2,vp=2", "order", {"schedule": "interleaved_1f1b"}),
    ],
)  # fmt: skip
def test_a_key_means_a_directive(text: str, op: str, fields: dict[str, Any]) -> None:
    plan = plan_of(text, global_batch=16)
    assert entries(plan, op) == [fields]
    assert [str(violation) for violation in check_plan(plan)] == []


@pytest.mark.parametrize("text", ["zero=0,dp=1", "recompute=none", "offload=none", "ep=1", "tp=1,cp=1,etp=1"])
def test_a_key_that_asks_for_nothing_adds_no_directive(text: str) -> None:
    named = {d["op"] for d in plan_of(text, gpus=1, global_batch=2).directives}
    assert named == {"mesh", "place", "split", "order"}


STRATEGIES = [
    "pp=2,dp=2,zero=1,schedule=gpipe,recompute=full",
    "pp=2,vp=2,schedule=interleaved_1f1b",
    "pp=2,vp=4,dp=2,zero=2,bucket_mb=1",
    "pp=2,vp=2,schedule=looped_bfs",
    "pp=2,vp=2,schedule=interleaved_zb",
    "pp=2,schedule=zb_h1",
    "pp=2,schedule=zbv",
    "pp=4,schedule=v_half",
    "pp=2,dp=2,zero=1,schedule=dualpipe_v",
    "pp=4,dp=2,schedule=dualpipe",
    "tp=2,pp=2,dp=2,zero=3,hsdp=1,recompute=full:1",
    "tp=2,cp=2,pp=2,dp=2,sp=off,async_tp=on",
    "ep=4,tp=2,dp=2,zero=1",
    "ep=2,etp=2,tp=2,dp=2,pp=2,schedule=zb_h1",
    "dp=2,zero=3,prefetch=2,recompute=selective,offload=activations,micro_batch=2",
]


@pytest.mark.parametrize("text", STRATEGIES)
def test_a_file_of_its_directives_gives_the_same_plan(text: str, tmp_path: Path) -> None:
    plan = plan_of(text, global_batch=16)
    path = tmp_path / "strategy.json"
    path.write_text(write_directives(plan.directives))
    again = compiled(
        str(path), model=sparse if "ep=" in text else dense, global_batch=16, gpus=plan.num_ranks
    )
    assert plan_to_bytes(replace(again, directive_places=plan.directive_places)) == plan_to_bytes(plan)


@pytest.mark.parametrize("text", STRATEGIES)
def test_the_canonical_text_gives_the_same_plan(text: str) -> None:
    plan = plan_of(text, global_batch=16)
    again = plan_of(plan.strategy, global_batch=16)
    assert plan_to_bytes(again) == plan_to_bytes(plan)


@pytest.mark.parametrize(
    ("text", "homes"),
    [
        ("pp=2,vp=2", [[0, 2], [1, 3]]),
        ("pp=2,vp=3", [[0, 2, 4], [1, 3, 5]]),
        ("pp=2,schedule=zbv", [[0, 3], [1, 2]]),
        ("pp=4,schedule=dualpipe_v", [[0, 7], [1, 6], [2, 5], [3, 4]]),
        ("pp=2,schedule=dualpipe", [[0, 1], [0, 1]]),
    ],
)
def test_stages_lie_in_a_loop_or_a_v_as_the_schedule_wants(text: str, homes: list[list[int]]) -> None:
    plan = plan_of(text)
    found = [
        sorted({task.stage for task in device.tasks if task.kind.name == "F"}) for device in plan.device_plans
    ]
    assert found == homes
    assert check_plan(plan) == []


def test_a_schedule_that_the_places_contradict_names_the_stages(tmp_path: Path) -> None:
    places = [{"op": "place", "filter": {"PP": s}, "at": {"pp": r}} for s, r in enumerate((0, 1, 0, 1))]
    path = tmp_path / "s.json"
    path.write_text(
        write_directives([{"op": "mesh", "axes": {"pp": 2}}, *places, {"op": "order", "schedule": "zbv"}])
    )
    with pytest.raises(StrategyError, match=r"does not put the stages \[0, 2\] together") as caught:
        compiled(str(path), model=dense, global_batch=8)
    assert caught.value.where == f"{path}:7"
    assert "[[0, 3], [1, 2]]" in caught.value.fix


@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("vp", [1, 3])
def test_a_rank_that_cannot_hold_a_stage_of_each_copy_is_refused(pp: int, vp: int) -> None:
    with pytest.raises(StrategyError) as caught:
        compiled(f"pp={pp},vp={vp},schedule=dualpipe", model=dense)
    assert (caught.value.field, caught.value.value) == ("vp", vp)
    assert "2 copies" in caught.value.rule

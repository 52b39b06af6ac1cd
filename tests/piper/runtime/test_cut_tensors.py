"""Ranks that cut tensors train as one process does: each computes its piece, and exchanges the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.piper.runtime.named_runs import require_close, run_named

EXPERTS = {
    "two experts on each rank": ("dp=4,ep=4", {}),
    "every expert on two ranks": ("dp=4,ep=2", {}),
    "in a pipeline, optimizer state cut": ("pp=2,dp=2,ep=2,zero=1", {}),
    "tokens from ranks of tp, too": ("tp=2,dp=2,ep=4", {"micro_batch": 2}),
    "backwards in halves": ("pp=2,dp=2,ep=2,schedule=zb_h1", {"micro_batch": 2}),
    "rows travel again": ("pp=2,dp=2,ep=2,recompute=full", {"micro_batch": 2}),
}
SEQUENCES = {
    "ring": ({"cp": 2}, {"method": "ring"}, []),
    "ring of neighbouring tokens": ({"cp": 2}, {"method": "ring", "balanced": False}, []),
    "ring of four": ({"cp": 4}, {"method": "ring"}, []),
    "tokens for heads": ({"cp": 2}, {"method": "all_to_all"}, []),
    "tokens for heads, made again": ({"cp": 2}, {"method": "all_to_all"}, ["recompute"]),
    "tokens for heads of one rank of tp": ({"tp": 2, "cp": 2}, {"method": "all_to_all"}, ["shard_tensor"]),
    "ring, made again, with ranks of tp": ({"tp": 2, "cp": 2}, {}, ["shard_tensor", "recompute"]),
}
OTHERS = {
    "recompute": {"op": "recompute", "filter": {"LAYER": "*"}, "mode": "full"},
    "shard_tensor": {"op": "shard_tensor", "filter": {"TP": "*"}},
}
TENSOR = {
    "columns, rows and vocabulary; tokens between them": ("tp=2,dp=2", {}),
    "columns, rows and vocabulary; whole tokens": ("tp=2,sp=off", {"micro_batch": 4}),
    "in a pipeline with replicas": ("pp=2,tp=2,dp=2", {"micro_batch": 2}),
    "exchanges are made again with what they bring": ("tp=2,recompute=full", {"micro_batch": 4}),
    "sums are made again": ("tp=2,sp=off,recompute=full", {"micro_batch": 4}),
    "optimizer state cut over replicas": ("tp=2,dp=2,zero=1", {"micro_batch": 2}),
    "backwards in halves": ("pp=2,tp=2,schedule=zb_h1", {"micro_batch": 2}),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_context_parallel_runs_equal_one_process(name: str, tmp_path: Path) -> None:
    axes, sequence, others = SEQUENCES[name]
    strategy = [
        {"op": "mesh", "axes": axes},
        {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 2},
        {"op": "replicate", "filter": {"PP": "*"}},
        {"op": "shard_sequence", "filter": {"CP": "*"}, **sequence},
        *(OTHERS[other] for other in others),
    ]
    file = tmp_path / "strategy.json"
    file.write_text(json.dumps(strategy))
    require_close(run_named("tiny-llama", str(file)))


@pytest.mark.parametrize(
    ("model", "strategy"),
    [("tiny-llama", "pp=2,cp=2,schedule=zb_h1"), ("tiny-moe", "cp=2,dp=2,ep=4")],
)
def test_rings_go_with_halves_and_with_experts(model: str, strategy: str) -> None:
    require_close(run_named(model, strategy, micro_batch=2))


@pytest.mark.parametrize("name", EXPERTS)
def test_expert_parallel_runs_equal_one_process(name: str) -> None:
    strategy, options = EXPERTS[name]
    require_close(run_named("tiny-moe", strategy, **options))


@pytest.mark.parametrize("name", TENSOR)
def test_tensor_parallel_runs_equal_one_process(name: str) -> None:
    strategy, options = TENSOR[name]
    require_close(run_named("tiny-llama", strategy, **options))

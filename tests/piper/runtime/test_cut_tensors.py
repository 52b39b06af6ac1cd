"""Ranks that cut tensors train as one process does: each computes its piece, and exchanges the rest."""

from __future__ import annotations

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
TENSOR = {
    "columns, rows and vocabulary; tokens between them": ("tp=2,dp=2", {}),
    "columns, rows and vocabulary; whole tokens": ("tp=2,sp=off", {"micro_batch": 4}),
    "in a pipeline with replicas": ("pp=2,tp=2,dp=2", {"micro_batch": 2}),
    "exchanges are made again with what they bring": ("tp=2,recompute=full", {"micro_batch": 4}),
    "sums are made again": ("tp=2,sp=off,recompute=full", {"micro_batch": 4}),
    "optimizer state cut over replicas": ("tp=2,dp=2,zero=1", {"micro_batch": 2}),
    "backwards in halves": ("pp=2,tp=2,schedule=zb_h1", {"micro_batch": 2}),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_expert_parallel_runs_equal_one_process(name: str) -> None:
    strategy, options = EXPERTS[name]
    require_close(run_named("tiny-moe", strategy, **options))


@pytest.mark.parametrize("name", TENSOR)
def test_tensor_parallel_runs_equal_one_process(name: str) -> None:
    strategy, options = TENSOR[name]
    require_close(run_named("tiny-llama", strategy, **options))

"""Ranks that cut tensors train as one process does: each computes its piece, and exchanges the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from piper.errors import JobError, ModelError
from tests.piper.runtime.named_runs import require_close, run_named
from tests.piper.runtime.small_models import small_model

NAMED = [
    ("tiny-llama", "tp=2,dp=2", {"micro_batch": 2}),
    ("tiny-llama", "pp=2,tp=2,dp=2", {"micro_batch": 2}),
    ("tiny-llama", "cp=2", {"micro_batch": 4}),
    ("tiny-moe", "dp=4,ep=4", {}),
    ("tiny-moe", "dp=4,ep=2", {}),
    ("tiny-moe", "pp=2,dp=2,ep=2,zero=1", {"micro_batch": 2}),
    ("tiny-moe", "tp=2,dp=2,ep=4", {"micro_batch": 2}),
]

COMBINATIONS = {
    "whole tokens between regions": ("llama", "tp=2,sp=off"),
    "exchanges are made again with what they bring": ("llama", "tp=2,recompute=full"),
    "sums are made again": ("llama", "pp=2,tp=2,sp=off,recompute=full"),
    "optimizer state cut over replicas": ("llama", "tp=2,dp=2,zero=1"),
    "backwards in halves": ("llama", "pp=2,tp=2,schedule=zb_h1"),
    "exchanges beside the computation": ("llama", "tp=2,dp=2,async_tp=on,recompute=full"),
    "exchanges beside halves": ("gpt2", "pp=2,tp=2,async_tp=on,schedule=zb_h1"),
    "rings in halves": ("llama", "pp=2,cp=2,schedule=zb_h1"),
    "experts in halves": ("mixtral", "pp=2,dp=2,ep=2,schedule=zb_h1"),
    "rows of experts travel again": ("mixtral", "dp=2,ep=2,recompute=full"),
    "rows of experts come from rings": ("mixtral", "cp=2,dp=2,ep=4"),
    "biases, learned positions, dropout, tied": ("gpt2", "tp=2,recompute=full"),
    "learned positions around a ring": ("gpt2", "cp=2,dp=2,zero=1"),
    "norms of single heads": ("qwen3", "tp=2"),
    "both parts of a layer at once": ("falcon", "tp=2,dp=2"),
    "latent attention, shared experts": ("deepseek_v2", "tp=2,dp=2,ep=4"),
    "biases of experts": ("gpt_oss", "pp=2,dp=2,ep=2,schedule=zb_h1"),
}

SEQUENCES = {
    "ring of neighbouring tokens": ({"cp": 2}, {"method": "ring", "balanced": False}, []),
    "ring of four": ({"cp": 4}, {"method": "ring"}, []),
    "tokens for heads, made again": ({"cp": 2}, {"method": "all_to_all"}, ["recompute"]),
    "neighbouring tokens for heads": ({"cp": 2}, {"method": "all_to_all", "balanced": False}, []),
    "tokens for heads of one rank of tp": ({"tp": 2, "cp": 2}, {"method": "all_to_all"}, ["shard_tensor"]),
    "ring, made again, with ranks of tp": ({"tp": 2, "cp": 2}, {}, ["shard_tensor", "recompute"]),
}

OTHERS = {
    "recompute": {"op": "recompute", "filter": {"LAYER": "*"}, "mode": "full"},
    "shard_tensor": {"op": "shard_tensor", "filter": {"TP": "*"}},
}


def sequence_strategy(name: str, folder: Path) -> str:
    """Write a strategy that cuts sequences and return its path."""
    axes, sequence, others = SEQUENCES[name]
    strategy = [
        {"op": "mesh", "axes": axes},
        {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 2},
        {"op": "replicate", "filter": {"PP": "*"}},
        {"op": "shard_sequence", "filter": {"CP": "*"}, **sequence},
        *(OTHERS[other] for other in others),
    ]
    file = folder / "strategy.json"
    file.write_text(json.dumps(strategy))
    return str(file)


@pytest.mark.parametrize(("model", "strategy", "options"), NAMED, ids=[strategy for _, strategy, _ in NAMED])
def test_named_run_equals_one_process(model: str, strategy: str, options: dict[str, object]) -> None:
    require_close(run_named(model, strategy, **options))


def test_tokens_are_exchanged_for_heads_in_tiny_llama(tmp_path: Path) -> None:
    require_close(run_named("tiny-llama", sequence_strategy("neighbouring tokens for heads", tmp_path)))


@pytest.mark.parametrize("name", COMBINATIONS)
def test_cuts_go_with_other_directives_and_with_other_models(name: str, tmp_path: Path) -> None:
    family, strategy = COMBINATIONS[name]
    options = {"micro_batch": 2} if "schedule" in strategy else {"micro_batch": 2, "global_batch": 4}
    require_close(run_named(small_model(family, tmp_path), strategy, **options))


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_are_cut_in_every_way(name: str, tmp_path: Path) -> None:
    family = "gpt2" if "heads of" in name else "llama"
    require_close(run_named(small_model(family, tmp_path), sequence_strategy(name, tmp_path)))


def test_fewer_heads_of_keys_than_ranks_are_refused(tmp_path: Path) -> None:
    strategy = sequence_strategy("tokens for heads of one rank of tp", tmp_path)
    with pytest.raises(JobError, match=r"(?s)heads = 1 cannot be cut over 2 ranks of cp.*\"ring\""):
        run_named(small_model("llama", tmp_path), strategy)


@pytest.mark.parametrize(
    ("family", "strategy", "rule"),
    [
        ("phi3", "tp=2", "chunk.*splits features that tensor parallelism cuts"),
        ("bloom", "tp=2", "attn_mask.*has a part for every head, and a rank has 2 heads"),
        ("bloom", "cp=2", "attn_mask.*cannot go round with keys and values"),
        ("llama", "tp=4", "unflatten.*whole heads of keys and values.*take fewer ranks of tp"),
    ],
)
def test_code_that_means_something_else_on_a_piece_is_refused(
    family: str, strategy: str, rule: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=f"(?s){rule}"):
        run_named(small_model(family, tmp_path), strategy)

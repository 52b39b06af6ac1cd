"""Decoders with experts."""

import math
from dataclasses import replace
from typing import Any

from piper.models.shape import FeedForward, Norm, RopeScaling, Rotary, Router, SparseMoE
from tests.piper.models.transformers_cases.case import (
    GQA,
    HEAD_DIM,
    LLAMA,
    RMS,
    ROTARY,
    WIDTH,
    Case,
    decoder,
    llama_layer,
)
from tests.piper.models.transformers_cases.weights import gpt_oss_experts, split_experts


def moe(router: Router, width: int = 24, **changes: Any) -> SparseMoE:
    return SparseMoE(router=router, expert=FeedForward(width=width), **changes)


MOE_NAMES = {
    r"\.mlp\.(experts\..*proj)$": r".block_sparse_moe.\1",
    r"\.mlp\.(gate\.weight|shared_expert_gate\.weight)": r".block_sparse_moe.\1",
    r"\.mlp\.shared_experts?\.": r".block_sparse_moe.shared_expert.",
}

WITH_EXPERTS: dict[str, Case] = {
    "mixtral": Case(
        model_type="mixtral",
        config=LLAMA | {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
        shape=decoder(llama_layer(feed_forward=moe(Router(experts=5, top_k=2), width=WIDTH))),
        names=MOE_NAMES,
        convert=split_experts,
    ),
    "qwen2_moe": Case(
        model_type="qwen2_moe",
        config=LLAMA | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                        "shared_expert_intermediate_size": 40, "norm_topk_prob": False},
        shape=decoder(
            llama_layer(
                attention=replace(GQA, qkv_bias=True),
                feed_forward=moe(
                    Router(experts=6, top_k=2, normalised=False),
                    shared=FeedForward(width=40),
                    shared_gate=True,
                ),
            )
        ),
        names=MOE_NAMES,
        convert=split_experts,
    ),
    "qwen3_moe": Case(
        model_type="qwen3_moe",
        config=LLAMA | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                        "norm_topk_prob": True},
        shape=decoder(
            llama_layer(attention=replace(GQA, qk_norm=RMS), feed_forward=moe(Router(experts=6, top_k=2)))
        ),
        names=MOE_NAMES,
        convert=split_experts,
    ),
    "gpt_oss": Case(
        model_type="gpt_oss",
        config=LLAMA | {
            "attention_bias": True, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 2.0,
                                "beta_slow": 1.0, "truncate": False,
                                "original_max_position_embeddings": 8}},
        shape=decoder(
            *(
                llama_layer(
                    attention=replace(
                        GQA,
                        window=window,
                        qkv_bias=True,
                        out_bias=True,
                        sinks=True,
                        rotary=Rotary(
                            theta=100.0,
                            dims=HEAD_DIM,
                            scaling=RopeScaling(
                                kind="yarn", factor=4.0, original_context=8, beta_fast=2.0, truncate=False,
                                attention_factor=0.1 * math.log(4.0) + 1,
                            ),
                        ),
                    ),
                    feed_forward=SparseMoE(
                        router=Router(experts=6, top_k=2, scores="softmax_of_chosen", bias=True),
                        expert=FeedForward(
                            width=WIDTH, up_bias=True, down_bias=True, fused_gate=True, clamp=7.0,
                            up_offset=1.0, gate_slope=1.702,
                        ),
                    ),
                )
                for window in (5, None)
            )
        ),
        names={r"\.mlp\.router": ".block_sparse_moe.gate", r"\.mlp\.experts": ".block_sparse_moe.experts"},
        convert=gpt_oss_experts,
    ),
    "olmoe": Case(
        model_type="olmoe",
        config=LLAMA | {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": False},
        shape=decoder(
            llama_layer(
                attention=replace(GQA, qk_norm=RMS, qk_norm_over="all"),
                feed_forward=moe(Router(experts=6, top_k=2, normalised=False), width=WIDTH),
            )
        ),
        names=MOE_NAMES,
        convert=split_experts,
    ),
    "granite_moe": Case(
        model_type="granitemoe",
        config=LLAMA | {"num_local_experts": 6, "num_experts_per_tok": 2},
        shape=decoder(
            llama_layer(
                attention=replace(GQA, scale=1.0),
                feed_forward=moe(Router(experts=6, top_k=2, scores="softmax_of_chosen"), width=WIDTH),
            )
        ),
        names={r"block_sparse_moe\.router": "block_sparse_moe.gate"},
        convert=split_experts,
    ),
    "llama4": Case(
        model_type="llama4_text",
        config=LLAMA | {
            "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 40, "use_qk_norm": True, "attn_temperature_tuning": False,
            "no_rope_layers": [1, 0], "layer_types": ["full_attention", "full_attention"]},
        shape=decoder(
            llama_layer(
                attention=replace(
                    GQA,
                    rotary=replace(ROTARY, interleaved=True),
                    qk_norm=Norm(kind="rms", eps=1e-6, weight=False),
                ),
                feed_forward=FeedForward(width=40),
            ),
            llama_layer(
                attention=replace(GQA, rotary=None),
                feed_forward=moe(
                    Router(experts=4, top_k=1, scores="sigmoid", normalised=False, weigh_input=True),
                    width=WIDTH,
                    shared=FeedForward(width=WIDTH),
                ),
            ),
        ),
        names={
            r"layers\.0\.feed_forward": "layers.0.mlp",
            r"feed_forward\.router": "block_sparse_moe.gate",
            "feed_forward": "block_sparse_moe",
        },
        convert=lambda weights: split_experts(
            {
                name: value.transpose(1, 2) if "experts." in name else value
                for name, value in weights.items()
            }
        ),
    ),
}  # fmt: skip

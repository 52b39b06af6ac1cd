"""Decoders with latent attention."""

import math
from dataclasses import replace

from piper.models.shape import FeedForward, LatentAttention, RopeScaling, Rotary, Router
from tests.piper.models.transformers_cases.case import HEADS, LLAMA, RMS, Case, decoder, llama_layer
from tests.piper.models.transformers_cases.weights import split_experts
from tests.piper.models.transformers_cases.with_experts import MOE_NAMES, moe

LATENT = LatentAttention(
    heads=HEADS, query_rank=24, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=6, norm=RMS,
    rotary=Rotary(theta=100.0, dims=4, interleaved=True),
)  # fmt: skip

LATENT_CONFIG = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_key_value_heads": HEADS, "head_dim": 4,
}  # fmt: skip

LATENT_ATTENTION: dict[str, Case] = {
    "deepseek_v2": Case(
        model_type="deepseek_v2",
        config=LLAMA | LATENT_CONFIG | {
            "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "n_group": 4,
            "topk_group": 2, "topk_method": "group_limited_greedy", "norm_topk_prob": False,
            "moe_intermediate_size": 24, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
            "num_hidden_layers": 3},
        shape=decoder(
            llama_layer(attention=LATENT),
            *(
                llama_layer(
                    attention=LATENT,
                    feed_forward=moe(
                        Router(experts=8, top_k=3, normalised=False, scaling=2.5, groups=4, groups_kept=2),
                        shared=FeedForward(width=48),
                    ),
                ),
            )
            * 2,
        ),
        names=MOE_NAMES,
        convert=split_experts,
    ),
    "deepseek_v3": Case(
        model_type="deepseek_v3",
        config=LLAMA | LATENT_CONFIG | {
            "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 4,
            "topk_group": 2, "norm_topk_prob": True, "moe_intermediate_size": 24,
            "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "num_hidden_layers": 3},
        shape=decoder(
            llama_layer(attention=LATENT),
            *(
                llama_layer(
                    attention=LATENT,
                    feed_forward=moe(
                        Router(
                            experts=8, top_k=3, scores="sigmoid", scaling=2.5, groups=4, groups_kept=2,
                            group_score="top2", correction_bias=True,
                        ),
                        shared=FeedForward(width=24),
                    ),
                ),
            )
            * 2,
        ),
        names=MOE_NAMES,
        convert=split_experts,
    ),
    "deepseek_v3_yarn": Case(
        model_type="deepseek_v3",
        config=LLAMA | LATENT_CONFIG | {
            "n_routed_experts": 8, "first_k_dense_replace": 2,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 2.0,
                                "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5,
                                "original_max_position_embeddings": 8}},
        shape=decoder(
            llama_layer(
                attention=replace(
                    LATENT,
                    rotary=Rotary(
                        theta=100.0,
                        dims=4,
                        interleaved=True,
                        scaling=RopeScaling(
                            kind="yarn", factor=4.0, original_context=8, beta_fast=2.0, beta_slow=0.5,
                            attention_factor=(0.1 * math.log(4.0) + 1) / (0.05 * math.log(4.0) + 1),
                        ),
                    ),
                    scale=12**-0.5 * (0.05 * math.log(4.0) + 1) ** 2,
                )
            )
        ),
    ),
}  # fmt: skip

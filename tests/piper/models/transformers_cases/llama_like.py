"""Llama and what differs from it in a bias, a norm, a window or its rotary frequencies."""

import math
from dataclasses import replace

from piper.models.shape import DecoderShape, FeedForward, Head, RopeScaling, Rotary
from tests.piper.models.transformers_cases.case import (
    GQA,
    HEAD_DIM,
    LLAMA,
    RMS,
    WIDTH,
    Case,
    decoder,
    llama_layer,
)
from tests.piper.models.transformers_cases.weights import by_kv_head


def stretched(scaling: RopeScaling, dims: int = HEAD_DIM) -> DecoderShape:
    """Return Llama with stretched rotary frequencies."""
    return decoder(
        llama_layer(attention=replace(GQA, rotary=Rotary(theta=100.0, dims=dims, scaling=scaling)))
    )


LLAMA_LIKE: dict[str, Case] = {
    "llama": Case(model_type="llama", config=LLAMA, shape=decoder(llama_layer())),
    "llama_tied_biases": Case(
        model_type="llama",
        config=LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        shape=decoder(
            llama_layer(
                attention=replace(GQA, qkv_bias=True, out_bias=True),
                feed_forward=FeedForward(width=WIDTH, up_bias=True, down_bias=True),
            ),
            head=Head(tied=True),
        ),
    ),
    "mistral_window": Case(
        model_type="mistral",
        config=LLAMA | {"sliding_window": 5},
        shape=decoder(llama_layer(attention=replace(GQA, window=5))),
    ),
    "qwen2": Case(
        model_type="qwen2",
        config=LLAMA,
        shape=decoder(llama_layer(attention=replace(GQA, qkv_bias=True))),
    ),
    "qwen3": Case(
        model_type="qwen3",
        config=LLAMA,
        shape=decoder(llama_layer(attention=replace(GQA, qk_norm=RMS))),
    ),
    "phi3_longrope": Case(
        model_type="phi3",
        config=LLAMA | {
            "original_max_position_embeddings": 8,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 1.0,
                                "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0],
                                "original_max_position_embeddings": 8}},
        shape=decoder(
            llama_layer(
                attention=replace(
                    GQA,
                    fused_qkv=True,
                    rotary=Rotary(
                        theta=100.0,
                        dims=HEAD_DIM,
                        scaling=RopeScaling(
                            kind="longrope", factor=4.0, original_context=8,
                            attention_factor=math.sqrt(1 + math.log(4.0) / math.log(8)),
                            short_factors=(1.0, 1.1, 1.2, 1.3), long_factors=(1.5, 2.0, 3.0, 4.0),
                        ),
                    ),
                ),
                feed_forward=FeedForward(width=WIDTH, fused_gate=True),
            )
        ),
        convert=lambda weights: by_kv_head(weights, order="parts"),
    ),
    "rope_llama3": Case(
        model_type="llama",
        config=LLAMA | {"rope_parameters": {
            "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16}},
        shape=stretched(
            RopeScaling(
                kind="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=16
            )
        ),
    ),
    "rope_yarn": Case(
        model_type="llama",
        config=LLAMA | {"rope_parameters": {
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.5,
            "original_max_position_embeddings": 8}},
        shape=stretched(
            RopeScaling(
                kind="yarn", factor=4.0, original_context=8, beta_fast=2.0, beta_slow=0.5,
                attention_factor=0.1 * math.log(4.0) + 1,
            )
        ),
    ),
    "rope_dynamic": Case(
        model_type="llama",
        config=LLAMA | {
            "max_position_embeddings": 8,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}},
        shape=stretched(RopeScaling(kind="dynamic", factor=2.0, original_context=8)),
    ),
}  # fmt: skip

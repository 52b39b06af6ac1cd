"""GPT-OSS (OpenAI 2025): experts with biases in every layer, learned sinks, every other layer slides.

Source of keys and defaults: transformers `GptOssConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from piper.models.fields import Fields
from piper.models.reading.rope import read_rotary, yarn_mscale
from piper.models.reading.routing import read_router
from piper.models.reading.trunk import ACTIVATIONS, Sizes, Trunk, assemble, read_trunk, read_windows, repeated
from piper.models.shape import (
    Attention,
    DecoderShape,
    FeedForward,
    Layer,
    Norm,
    RopeScaling,
    Rotary,
    Router,
    SparseMoE,
)

YARN = RopeScaling(
    kind="yarn", factor=32.0, original_context=4096, attention_factor=yarn_mscale(32.0, 1.0), truncate=False
)
"""Taken where a file states no rotary parameters at all."""

ROUTER = Router(experts=128, top_k=4, scores="softmax_of_chosen", bias=True)


def read(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a `config.json` object; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=131072, kv_heads=8, head_dim=64))
    norm = Norm(eps=read.number("rms_norm_eps", default=1e-5))
    bias = read.flag("attention_bias", default=True)
    attention = Attention(
        heads=trunk.heads, kv_heads=trunk.kv_heads, head_dim=trunk.head_dim, qkv_bias=bias, out_bias=bias,
        rotary=_rotary(read, trunk), sinks=True, dropout=read.share("attention_dropout", default=0.0),
    )  # fmt: skip
    moe = SparseMoE(
        router=read_router(read, ROUTER, experts="num_local_experts"),
        expert=FeedForward(
            width=read.count("intermediate_size"), up_bias=True, down_bias=True, fused_gate=True,
            activation=read.choice("hidden_act", ACTIVATIONS, default="silu"), up_offset=1.0,
            clamp=read.number("swiglu_limit", default=7.0),
            gate_slope=read.number("swiglu_alpha", default=1.702),
        ),
    )  # fmt: skip
    read.raw("experts_per_token")  # the same number as num_experts_per_tok, in the published files
    window = read.count_or_none("sliding_window", default=128)
    windows = read_windows(read, trunk.layers, window=window, slides=lambda number: number % 2 == 0)
    layers = repeated(
        trunk.layers,
        lambda number: Layer(
            attention=replace(attention, window=windows[number]), feed_forward=moe, norm=norm
        ),
    )
    return assemble(read, trunk, family="gpt_oss", layers=layers, norm=norm, tied=False)


def _rotary(read: Fields, trunk: Trunk) -> Rotary:
    found = read_rotary(read, head_dim=trunk.head_dim, context=trunk.context, theta=150000.0)
    read.raw("initial_context_length")  # the same number as the scaling's original context
    if read.has("rope_scaling") or read.has("rope_parameters"):
        return found
    read.assumed.append("rope_scaling = yarn, factor 32.0, original context 4096")
    return replace(found, scaling=YARN)

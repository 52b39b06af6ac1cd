"""Granite 3 (IBM 2024): Llama with four multipliers, dense and with experts.

Source of keys and defaults: transformers `GraniteConfig`, `GraniteMoeConfig`, `GraniteMoeSharedConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.models.fields import Fields
from piper.models.reading.rope import read_rotary
from piper.models.reading.routing import read_router
from piper.models.reading.trunk import ACTIVATIONS, Sizes, assemble, read_trunk
from piper.models.shape import (
    Attention,
    DecoderShape,
    Embedding,
    FeedForward,
    Head,
    Layer,
    Norm,
    Router,
    SparseMoE,
)


def read(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a dense Granite config; raises ModelError naming the field."""
    read = Fields(config, where=where)
    mlp_bias = read.flag("mlp_bias", default=False)
    feed_forward = FeedForward(
        width=read.count("intermediate_size"), up_bias=mlp_bias, down_bias=mlp_bias,
        activation=read.choice("hidden_act", ACTIVATIONS, default="silu"),
    )  # fmt: skip
    return _read(read, feed_forward, family="granite")


def read_moe(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a Granite config with experts; raises ModelError naming the field."""
    read = Fields(config, where=where)
    activation = read.choice("hidden_act", ACTIVATIONS, default="silu")
    router = Router(experts=8, top_k=2, scores="softmax_of_chosen")
    shared = read.count_or_zero("shared_intermediate_size", default=0)
    moe = SparseMoE(
        router=read_router(read, router, experts="num_local_experts"),
        expert=FeedForward(width=read.count("intermediate_size"), activation=activation),
        shared=FeedForward(width=shared, activation=activation) if shared else None,
    )
    return _read(read, moe, family="granite_moe")


def _read(read: Fields, feed_forward: FeedForward | SparseMoE, *, family: str) -> DecoderShape:
    trunk = read_trunk(read, Sizes(context=2048))
    norm = Norm(eps=read.number("rms_norm_eps", default=1e-6))
    bias = read.flag("attention_bias", default=False)
    layer = Layer(
        attention=Attention(
            heads=trunk.heads, kv_heads=trunk.kv_heads, head_dim=trunk.head_dim, qkv_bias=bias, out_bias=bias,
            rotary=read_rotary(read, head_dim=trunk.head_dim, context=trunk.context),
            scale=read.number("attention_multiplier", default=1.0),
            dropout=read.share("attention_dropout", default=0.0),
        ),
        feed_forward=feed_forward,
        norm=norm,
        residual_scale=read.number("residual_multiplier", default=1.0),
    )  # fmt: skip
    return assemble(
        read, trunk, family=family, layers=(layer,) * trunk.layers, norm=norm, tied=False,
        embedding=Embedding(scale=read.number("embedding_multiplier", default=1.0)),
        head=Head(scale=1 / read.number("logits_scaling", default=1.0)),
    )  # fmt: skip

"""OLMo 1 to 3 and OLMoE (Groeneveld et al. 2024, arXiv 2402.00838; 2025, arXiv 2501.00656).

OLMo 1 has layer norms without weights; OLMo 2 norms behind each part, and of all queries and keys together;
OLMo 3 slides in three layers of four; OLMoE has experts, and norms before each part.

Source of keys and defaults: transformers `OlmoConfig`, `Olmo2Config`, `Olmo3Config`, `OlmoeConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from piper.models.fields import Fields
from piper.models.reading.rope import read_rotary
from piper.models.reading.routing import read_router
from piper.models.reading.trunk import (
    ACTIVATIONS,
    FULL,
    SLIDING,
    Sizes,
    Trunk,
    assemble,
    read_trunk,
    read_windows,
    repeated,
)
from piper.models.shape import Attention, DecoderShape, FeedForward, Layer, Norm, Router, SparseMoE


def read_olmo(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read an OLMo 1 config; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=2048))
    norm = Norm(kind="layer", eps=1e-5, weight=False)
    attention = _attention(read, trunk, norm=None)
    attention = replace(attention, clip_qkv=read.number_or_none("clip_qkv"))
    layer = Layer(attention=attention, feed_forward=_feed_forward(read), norm=norm)
    return assemble(read, trunk, family="olmo", layers=(layer,) * trunk.layers, norm=norm, tied=False)


def read_olmo2(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read an OLMo 2 config; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=2048))
    norm = Norm(eps=read.number("rms_norm_eps", default=1e-5))
    attention = _attention(read, trunk, norm=norm)
    layer = Layer(attention=attention, feed_forward=_feed_forward(read), norm=norm, placement="post")
    return assemble(read, trunk, family="olmo2", layers=(layer,) * trunk.layers, norm=norm, tied=False)


def read_olmo3(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read an OLMo 3 config; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=2048))
    norm = Norm(eps=read.number("rms_norm_eps", default=1e-5))
    window = read.count_or_none("sliding_window", default=4096)
    windows = read_windows(read, trunk.layers, window=window, slides=lambda number: (number + 1) % 4 > 0)
    full = _attention(read, trunk, norm=norm, theta=5e5, kind_of_layer=FULL)
    sliding = _attention(read, trunk, norm=norm, theta=5e5, kind_of_layer=SLIDING)
    if full.rotary is not None and "rope_parameters" not in config:  # only layers that see all are stretched
        sliding = replace(sliding, rotary=replace(full.rotary, scaling=None))
    feed_forward = _feed_forward(read)

    def layer(number: int) -> Layer:
        window = windows[number]
        attention = full if window is None else replace(sliding, window=window)
        return Layer(attention=attention, feed_forward=feed_forward, norm=norm, placement="post")

    layers = repeated(trunk.layers, layer)
    return assemble(read, trunk, family="olmo3", layers=layers, norm=norm, tied=False)


def read_olmoe(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read an OLMoE config; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=4096))
    norm = Norm(eps=read.number("rms_norm_eps", default=1e-5))
    attention = replace(_attention(read, trunk, norm=norm), clip_qkv=read.number_or_none("clip_qkv"))
    router = read_router(read, Router(experts=64, top_k=8, normalised=False), normalised="norm_topk_prob")
    layer = Layer(
        attention=attention, feed_forward=SparseMoE(router=router, expert=_feed_forward(read)), norm=norm
    )
    return assemble(read, trunk, family="olmoe", layers=(layer,) * trunk.layers, norm=norm, tied=False)


def _attention(
    read: Fields, trunk: Trunk, *, norm: Norm | None, theta: float = 10000.0, kind_of_layer: str | None = None
) -> Attention:
    bias = read.flag("attention_bias", default=False)
    rotary = read_rotary(
        read, head_dim=trunk.head_dim, context=trunk.context, theta=theta, kind_of_layer=kind_of_layer
    )
    return Attention(
        heads=trunk.heads, kv_heads=trunk.kv_heads, head_dim=trunk.head_dim, qkv_bias=bias, out_bias=bias,
        qk_norm=norm, qk_norm_over="head" if norm is None else "all", rotary=rotary,
        dropout=read.share("attention_dropout", default=0.0),
    )  # fmt: skip


def _feed_forward(read: Fields) -> FeedForward:
    return FeedForward(
        width=read.count("intermediate_size"),
        activation=read.choice("hidden_act", ACTIVATIONS, default="silu"),
    )

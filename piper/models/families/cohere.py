"""Command R and R+ (Cohere 2024), Command R7B and A (2025): one norm without bias for both parts.

Command R+ has norms of queries and keys with a weight for each head; the models of 2025 slide in three layers
of four, and rotate in those alone.

Source of keys and defaults: transformers `CohereConfig`, `Cohere2Config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from piper.models.fields import Fields
from piper.models.reading.rope import read_rotary
from piper.models.reading.trunk import (
    ACTIVATIONS,
    Sizes,
    Trunk,
    assemble,
    read_trunk,
    read_windows,
    repeated,
)
from piper.models.shape import Attention, DecoderShape, FeedForward, Head, Layer, Norm

OTHER_WORDS = (
    "layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct",
    "use_embedding_sharing", "use_gated_activation", "use_parallel_block", "use_parallel_embedding",
)  # fmt: skip
"""Keys of published files that say the family's own form again."""


def read_cohere(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a Command R or R+ config; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=8192))
    norm = _norm(read)
    attention = _attention(read, trunk, theta=5e5)
    if read.flag("use_qk_norm", default=False):
        attention = replace(attention, qk_norm=norm, qk_norm_over="each")
    layer = _layer(attention, _feed_forward(read), norm)
    return _cohere(read, trunk, family="cohere", layers=(layer,) * trunk.layers, norm=norm)


def read_cohere2(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a Command R7B or A config; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=8192))
    norm, feed_forward = _norm(read), _feed_forward(read)
    attention = _attention(read, trunk, theta=10000.0)
    window = read.count_or_none("sliding_window", default=4096)
    every = read.count("sliding_window_pattern", default=4)
    windows = read_windows(read, trunk.layers, window=window, slides=lambda number: (number + 1) % every > 0)
    unrotated = replace(attention, rotary=None)

    def layer(number: int) -> Layer:
        window = windows[number]
        slides = unrotated if window is None else replace(attention, window=window)
        return _layer(slides, feed_forward, norm)

    for name in OTHER_WORDS:
        read.raw(name)
    return _cohere(read, trunk, family="cohere2", layers=repeated(trunk.layers, layer), norm=norm)


def _norm(read: Fields) -> Norm:
    return Norm(kind="layer", eps=read.number("layer_norm_eps", default=1e-5))


def _attention(read: Fields, trunk: Trunk, *, theta: float) -> Attention:
    bias = read.flag("attention_bias", default=False)
    rotary = read_rotary(read, head_dim=trunk.head_dim, context=trunk.context, theta=theta, interleaved=True)
    return Attention(
        heads=trunk.heads, kv_heads=trunk.kv_heads, head_dim=trunk.head_dim, qkv_bias=bias, out_bias=bias,
        rotary=rotary, dropout=read.share("attention_dropout", default=0.0),
    )  # fmt: skip


def _feed_forward(read: Fields) -> FeedForward:
    return FeedForward(
        width=read.count("intermediate_size"),
        activation=read.choice("hidden_act", ACTIVATIONS, default="silu"),
    )


def _layer(attention: Attention, feed_forward: FeedForward, norm: Norm) -> Layer:
    return Layer(attention=attention, feed_forward=feed_forward, norm=norm, placement="parallel_shared")


def _cohere(
    read: Fields, trunk: Trunk, *, family: str, layers: tuple[Layer, ...], norm: Norm
) -> DecoderShape:
    head = Head(scale=read.number("logit_scale", default=0.0625))
    return assemble(read, trunk, family=family, layers=layers, norm=norm, tied=True, head=head)

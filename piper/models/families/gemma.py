"""Gemma 1, 2 and 3 (text): embedding scaled by sqrt(hidden), norms with an offset, tied head.

Gemma 2 (arXiv 2408.00118): norms before and after each part, soft caps, every other layer slides. Gemma 3
(arXiv 2503.19786): norms of queries and keys instead of soft caps; five of six layers slide, on
a rotary base of their own.

Source of keys and defaults: transformers `GemmaConfig`, `Gemma2Config`, `Gemma3TextConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from piper.models.fields import Fields
from piper.models.reading.rope import read_rotary
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
from piper.models.shape import Attention, DecoderShape, Embedding, FeedForward, Head, Layer, Norm, Rotary

TANH = "gelu_pytorch_tanh"


def read_gemma(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a Gemma 1 config; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=8192, kv_heads=16, head_dim=256))
    norm = Norm(eps=read.number("rms_norm_eps", default=1e-6), offset=True)
    bias = read.flag("attention_bias", default=False)
    attention = Attention(
        heads=trunk.heads, kv_heads=trunk.kv_heads, head_dim=trunk.head_dim, qkv_bias=bias, out_bias=bias,
        rotary=read_rotary(read, head_dim=trunk.head_dim, context=trunk.context),
        dropout=read.share("attention_dropout", default=0.0),
    )  # fmt: skip
    # "gelu" in the first published files means the tanh form.
    meanings = {**ACTIVATIONS, "gelu": ACTIVATIONS[TANH]}
    name = "hidden_activation" if read.has("hidden_activation") else "hidden_act"
    read.raw("hidden_act")
    feed_forward = FeedForward(
        width=read.count("intermediate_size"), activation=read.choice(name, meanings, default=TANH)
    )
    layer = Layer(attention=attention, feed_forward=feed_forward, norm=norm)
    return _gemma(read, trunk, family="gemma", layers=(layer,) * trunk.layers, norm=norm)


def read_gemma2(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a Gemma 2 config; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=8192, kv_heads=4, head_dim=256))
    rotary = read_rotary(read, head_dim=trunk.head_dim, context=trunk.context)
    norm = Norm(eps=read.number("rms_norm_eps", default=1e-6), offset=True)
    layers = _layers(
        read, trunk, norm=norm, rotaries={SLIDING: rotary, FULL: rotary}, pattern=2, softcap=50.0, norms=False
    )
    return _gemma(read, trunk, family="gemma2", layers=layers, norm=norm, softcap=30.0)


def read_gemma3(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read the text part of a Gemma 3 config; raises ModelError naming the field."""
    read = Fields(config, where=where)
    sizes = Sizes(
        context=131072, kv_heads=4, head_dim=256, hidden=2304, layers=26, heads=8, vocabulary=262208
    )
    trunk = read_trunk(read, sizes)
    rotaries = {
        FULL: read_rotary(
            read, head_dim=trunk.head_dim, context=trunk.context, theta=1e6, kind_of_layer=FULL
        ),
        SLIDING: _local_rotary(read, trunk),
    }
    norm = Norm(eps=read.number("rms_norm_eps", default=1e-6), offset=True)
    read.refuse("use_bidirectional_attention", unless=False)
    pattern = read.count("sliding_window_pattern", default=6)
    layers = _layers(
        read, trunk, norm=norm, rotaries=rotaries, pattern=pattern, softcap=None, norms=True, width=9216
    )
    return _gemma(read, trunk, family="gemma3", layers=layers, norm=norm)


def _local_rotary(read: Fields, trunk: Trunk) -> Rotary:
    """Return the rotary embedding of sliding layers: a base of its own, never stretched."""
    nested = read.inner("rope_parameters")
    local = nested.inner(SLIDING) if nested is not None else None
    if local is not None:
        return read_rotary(read, head_dim=trunk.head_dim, context=trunk.context, kind_of_layer=SLIDING)
    return Rotary(theta=read.number("rope_local_base_freq", default=10000.0), dims=trunk.head_dim)


def _layers(
    read: Fields, trunk: Trunk, *, norm: Norm, rotaries: Mapping[str, Rotary], pattern: int,
    softcap: float | None, norms: bool, width: int | None = None,
) -> tuple[Layer, ...]:  # fmt: skip
    bias = read.flag("attention_bias", default=False)
    window = read.count_or_none("sliding_window", default=4096)
    windows = read_windows(
        read, trunk.layers, window=window, slides=lambda number: (number + 1) % pattern > 0
    )
    attention = Attention(
        heads=trunk.heads, kv_heads=trunk.kv_heads, head_dim=trunk.head_dim, qkv_bias=bias, out_bias=bias,
        qk_norm=norm if norms else None,
        softcap=read.number_or_none("attn_logit_softcapping", default=softcap),
        scale=read.number("query_pre_attn_scalar", default=256) ** -0.5,
        dropout=read.share("attention_dropout", default=0.0),
    )  # fmt: skip
    feed_forward = FeedForward(
        width=read.count("intermediate_size", default=width),
        activation=read.choice("hidden_activation", ACTIVATIONS, default=TANH),
    )
    read.raw("hidden_act")  # a left-over of the first files; hidden_activation counts

    def layer(number: int) -> Layer:
        window = windows[number]
        rotary = rotaries[FULL if window is None else SLIDING]
        return Layer(
            attention=replace(attention, window=window, rotary=rotary), feed_forward=feed_forward, norm=norm,
            placement="sandwich",
        )  # fmt: skip

    return repeated(trunk.layers, layer)


def _gemma(
    read: Fields,
    trunk: Trunk,
    *,
    family: str,
    layers: tuple[Layer, ...],
    norm: Norm,
    softcap: float | None = None,
) -> DecoderShape:
    final = read.number_or_none("final_logit_softcapping", default=softcap) if family != "gemma" else None
    read.raw("cache_implementation")
    return assemble(
        read, trunk, family=family, layers=layers, norm=norm, tied=True,
        embedding=Embedding(scale=trunk.hidden**0.5), head=Head(softcap=final),
    )  # fmt: skip

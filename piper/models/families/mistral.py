"""Mistral (Jiang et al. 2023, arXiv 2310.06825) and Ministral: a window in all or some layers.

Source of keys and defaults: transformers `MistralConfig`, `MinistralConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.models.fields import Fields
from piper.models.reading.rope import read_rotary
from piper.models.reading.trunk import ACTIVATIONS, Sizes, assemble, read_trunk, read_windows, repeated
from piper.models.shape import Attention, DecoderShape, FeedForward, Layer, Norm


def read(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a `config.json` object; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=131072, kv_heads=8))
    norm = Norm(eps=read.number("rms_norm_eps", default=1e-6))
    rotary = read_rotary(read, head_dim=trunk.head_dim, context=trunk.context)
    dropout = read.share("attention_dropout", default=0.0)
    window = read.count_or_none("sliding_window", default=4096)
    windows = read_windows(read, trunk.layers, window=window, slides=lambda _: True)
    feed_forward = FeedForward(
        width=read.count("intermediate_size"),
        activation=read.choice("hidden_act", ACTIVATIONS, default="silu"),
    )

    def layer(number: int) -> Layer:
        attention = Attention(
            heads=trunk.heads, kv_heads=trunk.kv_heads, head_dim=trunk.head_dim, rotary=rotary,
            window=windows[number], dropout=dropout,
        )  # fmt: skip
        return Layer(attention=attention, feed_forward=feed_forward, norm=norm)

    layers = repeated(trunk.layers, layer)
    return assemble(read, trunk, family="mistral", layers=layers, norm=norm, tied=False)

"""EXAONE 4 (LG AI Research 2025, arXiv 2507.11407): norms behind each part, three layers of four slide.

Source of keys and defaults: transformers `Exaone4Config`.
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
    trunk = read_trunk(read, Sizes(context=2048, kv_heads=32))
    norm = Norm(eps=read.number("rms_norm_eps", default=1e-5))
    rotary = read_rotary(read, head_dim=trunk.head_dim, context=trunk.context)
    window = read.count_or_none("sliding_window", default=4096)
    pattern = read.raw("sliding_window_pattern")  # "LLLG" in the published files: a number in other words
    every = (
        len(pattern)
        if isinstance(pattern, str) and pattern
        else read.count("sliding_window_pattern", default=4)
    )
    windows = read_windows(read, trunk.layers, window=window, slides=lambda number: (number + 1) % every > 0)
    dropout = read.share("attention_dropout", default=0.0)
    feed_forward = FeedForward(
        width=read.count("intermediate_size"),
        activation=read.choice("hidden_act", ACTIVATIONS, default="silu"),
    )

    def layer(number: int) -> Layer:
        # A model that never slides rotates everywhere.
        rotates = window is None or windows[number] is not None
        attention = Attention(
            heads=trunk.heads, kv_heads=trunk.kv_heads, head_dim=trunk.head_dim, qk_norm=norm,
            rotary=rotary if rotates else None, window=windows[number], dropout=dropout,
        )  # fmt: skip
        return Layer(attention=attention, feed_forward=feed_forward, norm=norm, placement="post")

    layers = repeated(trunk.layers, layer)
    return assemble(read, trunk, family="exaone4", layers=layers, norm=norm, tied=False)

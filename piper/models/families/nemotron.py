"""Nemotron (Parmar et al. 2024, arXiv 2402.16819): squared ReLU, norms with an offset, half-rotated heads.

Source of keys and defaults: transformers `NemotronConfig` (before version 5 also `partial_rotary_factor`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.models.fields import Fields
from piper.models.reading.rope import read_rotary
from piper.models.reading.trunk import ACTIVATIONS, Sizes, assemble, read_trunk
from piper.models.shape import Attention, DecoderShape, FeedForward, Layer, Norm


def read(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a `config.json` object; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=4096))
    norm = Norm(kind="layer", eps=read.number("norm_eps", default=1e-5), bias=True, offset=True)
    bias, mlp_bias = read.flag("attention_bias", default=False), read.flag("mlp_bias", default=False)
    share = read.number("rope_percent") if read.has("rope_percent") else 0.5
    layer = Layer(
        attention=Attention(
            heads=trunk.heads, kv_heads=trunk.kv_heads, head_dim=trunk.head_dim, qkv_bias=bias, out_bias=bias,
            rotary=read_rotary(read, head_dim=trunk.head_dim, context=trunk.context, share=share),
            dropout=read.share("attention_dropout", default=0.0),
        ),
        feed_forward=FeedForward(
            width=read.count("intermediate_size"), gated=False, up_bias=mlp_bias, down_bias=mlp_bias,
            activation=read.choice("hidden_act", ACTIVATIONS, default="relu2"),
        ),
        norm=norm,
        dropout=read.share("hidden_dropout", default=0.0),
    )  # fmt: skip
    layers = (layer,) * trunk.layers
    return assemble(read, trunk, family="nemotron", layers=layers, norm=norm, tied=False, default_std=0.0134)

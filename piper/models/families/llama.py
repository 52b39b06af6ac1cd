"""Llama 1 to 3.x, and what is published as one (Yi, TinyLlama): grouped queries, RMS norm, SwiGLU.

Source of keys and defaults: transformers `LlamaConfig` (version 4: `rope_theta`, `rope_scaling`; version 5:
`rope_parameters`).
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
    trunk = read_trunk(read, Sizes(context=2048))
    norm = Norm(eps=read.number("rms_norm_eps", default=1e-6))
    bias, mlp_bias = read.flag("attention_bias", default=False), read.flag("mlp_bias", default=False)
    layer = Layer(
        attention=Attention(
            heads=trunk.heads, kv_heads=trunk.kv_heads, head_dim=trunk.head_dim, qkv_bias=bias, out_bias=bias,
            rotary=read_rotary(read, head_dim=trunk.head_dim, context=trunk.context),
            dropout=read.share("attention_dropout", default=0.0),
        ),
        feed_forward=FeedForward(
            width=read.count("intermediate_size"), up_bias=mlp_bias, down_bias=mlp_bias,
            activation=read.choice("hidden_act", ACTIVATIONS, default="silu"),
        ),
        norm=norm,
        dropout=read.share("hidden_dropout", default=0.0),
    )  # fmt: skip
    return assemble(read, trunk, family="llama", layers=(layer,) * trunk.layers, norm=norm, tied=False)

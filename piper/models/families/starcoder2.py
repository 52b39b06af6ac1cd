"""StarCoder 2 (Lozhkov et al. 2024, arXiv 2402.19173): biases, a plain feed-forward part.

Source of keys and defaults: transformers `Starcoder2Config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.models.fields import Fields
from piper.models.reading.rope import read_rotary
from piper.models.reading.trunk import ACTIVATIONS, Sizes, assemble, read_trunk
from piper.models.shape import Attention, DecoderShape, Embedding, FeedForward, Layer, Norm


def read(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a `config.json` object; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=4096, kv_heads=2))
    norm = Norm(kind="layer", eps=read.number("norm_epsilon", default=1e-5), bias=True)
    bias = read.flag("use_bias", default=True)
    layer = Layer(
        attention=Attention(
            heads=trunk.heads, kv_heads=trunk.kv_heads, head_dim=trunk.head_dim, qkv_bias=bias, out_bias=bias,
            rotary=read_rotary(read, head_dim=trunk.head_dim, context=trunk.context),
            window=read.count_or_none("sliding_window"), dropout=read.share("attention_dropout", default=0.0),
        ),
        feed_forward=FeedForward(
            width=read.count("intermediate_size"), gated=False, up_bias=bias, down_bias=bias,
            activation=read.choice("hidden_act", ACTIVATIONS, default="gelu_pytorch_tanh"),
        ),
        norm=norm,
        dropout=read.share("residual_dropout", default=0.0),
    )  # fmt: skip
    return assemble(
        read, trunk, family="starcoder2", layers=(layer,) * trunk.layers, norm=norm, tied=True,
        embedding=Embedding(dropout=read.share("embedding_dropout", default=0.0)), default_std=0.018042,
    )  # fmt: skip

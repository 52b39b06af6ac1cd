"""GLM 4 (0414; Zeng et al. 2024, arXiv 2406.12793): norms before and after each part.

Source of keys and defaults: transformers `Glm4Config`.
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
    trunk = read_trunk(read, Sizes(context=131072, kv_heads=2, head_dim=128))
    norm = Norm(eps=read.number("rms_norm_eps", default=1.5625e-07))
    layer = Layer(
        attention=Attention(
            heads=trunk.heads, kv_heads=trunk.kv_heads, head_dim=trunk.head_dim,
            qkv_bias=read.flag("attention_bias", default=True),
            rotary=read_rotary(
                read, head_dim=trunk.head_dim, context=trunk.context, share=0.5, interleaved=True
            ),
            dropout=read.share("attention_dropout", default=0.0),
        ),
        feed_forward=FeedForward(
            width=read.count("intermediate_size"), fused_gate=True,
            activation=read.choice("hidden_act", ACTIVATIONS, default="silu"),
        ),
        norm=norm,
        placement="sandwich",
    )  # fmt: skip
    return assemble(read, trunk, family="glm4", layers=(layer,) * trunk.layers, norm=norm, tied=False)

"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): Mistral with routed experts.

Source of keys and defaults: transformers `MixtralConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.models.fields import Fields
from piper.models.reading.rope import read_rotary
from piper.models.reading.routing import read_router
from piper.models.reading.trunk import ACTIVATIONS, Sizes, assemble, read_trunk
from piper.models.shape import Attention, DecoderShape, FeedForward, Layer, Norm, Router, SparseMoE


def read(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a `config.json` object; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=131072, kv_heads=8))
    norm = Norm(eps=read.number("rms_norm_eps", default=1e-5))
    layer = Layer(
        attention=Attention(
            heads=trunk.heads, kv_heads=trunk.kv_heads, head_dim=trunk.head_dim,
            rotary=read_rotary(read, head_dim=trunk.head_dim, context=trunk.context, theta=1e6),
            window=read.count_or_none("sliding_window"),
            dropout=read.share("attention_dropout", default=0.0),
        ),
        feed_forward=SparseMoE(
            router=read_router(read, Router(experts=8, top_k=2), experts="num_local_experts"),
            expert=FeedForward(
                width=read.count("intermediate_size"),
                activation=read.choice("hidden_act", ACTIVATIONS, default="silu"),
            ),
        ),
        norm=norm,
    )  # fmt: skip
    return assemble(read, trunk, family="mixtral", layers=(layer,) * trunk.layers, norm=norm, tied=False)

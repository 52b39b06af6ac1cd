"""MiniMax M2 (2025): experts in every layer, all queries and all keys normed together, half-rotated heads.

Source of keys and defaults: transformers `MiniMaxM2Config`; `rotary_dim` from the published file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.models.fields import Fields
from piper.models.reading.rope import read_rotary
from piper.models.reading.routing import read_router
from piper.models.reading.trunk import ACTIVATIONS, Sizes, assemble, read_trunk
from piper.models.shape import Attention, DecoderShape, FeedForward, Layer, Norm, Router, SparseMoE

ROUTER = Router(experts=256, top_k=8, scores="sigmoid", correction_bias=True)


def read(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a `config.json` object; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=196608, kv_heads=8, head_dim=128))
    norm = Norm(eps=read.number("rms_norm_eps", default=1e-6))
    share = read.count("rotary_dim") / trunk.head_dim if read.has("rotary_dim") else 1.0
    layer = Layer(
        attention=Attention(
            heads=trunk.heads, kv_heads=trunk.kv_heads, head_dim=trunk.head_dim, qk_norm=norm,
            qk_norm_over="all",
            rotary=read_rotary(
                read, head_dim=trunk.head_dim, context=trunk.context, theta=5e6, share=share
            ),
            dropout=read.share("attention_dropout", default=0.0),
        ),
        feed_forward=SparseMoE(
            router=read_router(read, ROUTER, experts="num_local_experts"),
            expert=FeedForward(
                width=read.count("intermediate_size"),
                activation=read.choice("hidden_act", ACTIVATIONS, default="silu"),
            ),
        ),
        norm=norm,
    )  # fmt: skip
    layers = (layer,) * trunk.layers
    return assemble(read, trunk, family="minimax_m2", layers=layers, norm=norm, tied=False)

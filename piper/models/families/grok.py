"""Grok-1 (xAI 2024): experts in every layer, norms before and after each part, capped scores.

Source of keys: hpcai-tech/grok-1 and its conversion `Grok1Config`; of defaults: xai-org/grok-1, `run.py` and
`model.py` (the activation is the tanh form of GELU, as jax.nn.gelu takes it by default).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.models.fields import Fields
from piper.models.reading.rope import read_rotary
from piper.models.reading.routing import read_router
from piper.models.reading.trunk import ACTIVATIONS, Sizes, assemble, read_trunk
from piper.models.shape import (
    Attention,
    DecoderShape,
    Embedding,
    FeedForward,
    Head,
    Layer,
    Norm,
    Router,
    SparseMoE,
)


def read(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a `config.json` object; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=8192, kv_heads=8))
    norm = Norm(eps=read.number("rms_norm_eps", default=1e-5))
    experts = "num_local_experts" if read.has("num_local_experts") else "num_experts"
    defaults = Router(
        experts=8, top_k=2, normalised=False, softcap=read.number_or_none("router_logit_softcapping")
    )
    layer = Layer(
        attention=Attention(
            heads=trunk.heads, kv_heads=trunk.kv_heads, head_dim=trunk.head_dim,
            rotary=read_rotary(read, head_dim=trunk.head_dim, context=trunk.context),
            softcap=read.number("max_attn_value", default=30.0),
            scale=read.number("attn_output_multiplier", default=128**-0.5),
            dropout=read.share("attention_dropout", default=0.0),
        ),
        feed_forward=SparseMoE(
            router=read_router(read, defaults, experts=experts),
            expert=FeedForward(
                width=read.count("intermediate_size"),
                activation=read.choice("hidden_act", ACTIVATIONS, default="gelu_pytorch_tanh"),
            ),
        ),
        norm=norm,
        placement="sandwich",
    )  # fmt: skip
    return assemble(
        read, trunk, family="grok", layers=(layer,) * trunk.layers, norm=norm, tied=True,
        embedding=Embedding(scale=read.number("embedding_multiplier_scale", default=trunk.hidden**0.5)),
        head=Head(scale=read.number("output_multiplier_scale", default=3**-0.5)),
    )  # fmt: skip

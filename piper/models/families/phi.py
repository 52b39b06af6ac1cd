"""Phi 1 to 2 (one norm for both parts, biases everywhere) and Phi 3 to 4 (Llama with fused projections).

Source of keys and defaults: transformers `PhiConfig`, `Phi3Config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.models.fields import Fields
from piper.models.reading.rope import read_rotary
from piper.models.reading.trunk import ACTIVATIONS, Sizes, assemble, read_trunk
from piper.models.shape import Attention, DecoderShape, Embedding, FeedForward, Head, Layer, Norm


def read_phi(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a Phi 1, 1.5 or 2 config; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=2048))
    norm = Norm(kind="layer", eps=read.number("layer_norm_eps", default=1e-5), bias=True)
    layer = Layer(
        attention=Attention(
            heads=trunk.heads, kv_heads=trunk.kv_heads, head_dim=trunk.head_dim, qkv_bias=True, out_bias=True,
            qk_norm=norm if read.flag("qk_layernorm", default=False) else None,
            rotary=read_rotary(read, head_dim=trunk.head_dim, context=trunk.context, share=0.5),
            dropout=read.share("attention_dropout", default=0.0),
        ),
        feed_forward=FeedForward(
            width=read.count("intermediate_size"), gated=False, up_bias=True, down_bias=True,
            activation=read.choice("hidden_act", ACTIVATIONS, default="gelu_new"),
        ),
        norm=norm,
        placement="parallel_shared",
        dropout=read.share("resid_pdrop", default=0.0),
    )  # fmt: skip
    return assemble(
        read, trunk, family="phi", layers=(layer,) * trunk.layers, norm=norm, tied=False,
        embedding=Embedding(dropout=read.share("embd_pdrop", default=0.0)), head=Head(bias=True),
    )  # fmt: skip


def read_phi3(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a Phi 3, 3.5 mini or 4 config; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=4096))
    norm = Norm(eps=read.number("rms_norm_eps", default=1e-5))
    layer = Layer(
        attention=Attention(
            heads=trunk.heads, kv_heads=trunk.kv_heads, head_dim=trunk.head_dim, fused_qkv=True,
            rotary=read_rotary(read, head_dim=trunk.head_dim, context=trunk.context),
            window=read.count_or_none("sliding_window"), dropout=read.share("attention_dropout", default=0.0),
        ),
        feed_forward=FeedForward(
            width=read.count("intermediate_size"), fused_gate=True,
            activation=read.choice("hidden_act", ACTIVATIONS, default="silu"),
        ),
        norm=norm,
        dropout=read.share("resid_pdrop", default=0.0),
    )  # fmt: skip
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        read.refuse(name, unless=False)
    # The module of this family has no dropout of the embedding, whatever embd_pdrop says.
    read.raw("embd_pdrop")
    return assemble(read, trunk, family="phi3", layers=(layer,) * trunk.layers, norm=norm, tied=False)

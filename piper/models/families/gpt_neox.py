"""GPT-NeoX (Black et al. 2022, arXiv 2204.06745) and Pythia: attention and feed-forward part side by side.

Source of keys and defaults: transformers `GPTNeoXConfig` (before version 5: `rotary_pct`, `rotary_emb_base`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.models.fields import Fields
from piper.models.reading.rope import read_rotary
from piper.models.reading.trunk import ACTIVATIONS, Names, Sizes, assemble, read_placement, read_trunk
from piper.models.shape import Attention, DecoderShape, Embedding, FeedForward, Layer, Norm

NAMES = Names(kv_heads=None, head_dim=None)


def read(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a `config.json` object; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=2048), names=NAMES)
    norm = Norm(kind="layer", eps=read.number("layer_norm_eps", default=1e-5), bias=True)
    bias = read.flag("attention_bias", default=True)
    dropout = read.share("hidden_dropout", default=0.0)
    layer = Layer(
        attention=Attention(
            heads=trunk.heads, kv_heads=trunk.heads, head_dim=trunk.head_dim, qkv_bias=bias, out_bias=bias,
            fused_qkv=True, dropout=read.share("attention_dropout", default=0.0),
            rotary=read_rotary(
                read, head_dim=trunk.head_dim, context=trunk.context,
                theta=read.number("rotary_emb_base", default=10000.0),
                share=read.number("rotary_pct", default=0.25),
            ),
        ),
        feed_forward=FeedForward(
            width=read.count("intermediate_size"), gated=False, up_bias=True, down_bias=True,
            activation=read.choice("hidden_act", ACTIVATIONS, default="gelu"),
        ),
        norm=norm,
        placement=read_placement(parallel=read.flag("use_parallel_residual", default=True), shared=False),
        dropout=dropout,
    )  # fmt: skip
    return assemble(
        read, trunk, family="gpt_neox", layers=(layer,) * trunk.layers, norm=norm, tied=False,
        embedding=Embedding(dropout=dropout),
    )  # fmt: skip

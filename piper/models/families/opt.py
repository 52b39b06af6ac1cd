"""OPT (Zhang et al. 2022, arXiv 2205.01068): GPT-3 with ReLU.

Source of keys and defaults: transformers `OPTConfig`; its position embedding has two unread rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.models.fields import Fields
from piper.models.reading.trunk import ACTIVATIONS, Names, Sizes, assemble, read_trunk
from piper.models.shape import Attention, DecoderShape, Embedding, FeedForward, Layer, Norm

NAMES = Names(kv_heads=None, head_dim=None)
ROWS_NEVER_READ = 2


def read(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a `config.json` object; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=2048), names=NAMES)
    read.refuse("do_layer_norm_before", unless=True)
    read.refuse("_remove_final_layer_norm", unless=False)
    read.refuse("layerdrop", unless=0.0)
    projected = read.count("word_embed_proj_dim", default=trunk.hidden)
    read.require(
        projected == trunk.hidden, "word_embed_proj_dim", value=projected,
        rule=f"is not supported unless it is {trunk.hidden} (hidden_size)",
    )  # fmt: skip
    weight = read.flag("layer_norm_elementwise_affine", default=True)
    norm = Norm(kind="layer", eps=1e-5, bias=weight, weight=weight)
    bias = read.flag("enable_bias", default=True)
    dropout = read.share("dropout", default=0.1)
    layer = Layer(
        attention=Attention(
            heads=trunk.heads, kv_heads=trunk.heads, head_dim=trunk.head_dim, qkv_bias=bias, out_bias=bias,
            dropout=read.share("attention_dropout", default=0.0),
        ),
        feed_forward=FeedForward(
            width=read.count("ffn_dim"), gated=False, up_bias=bias, down_bias=bias,
            activation=read.choice("activation_function", ACTIVATIONS, default="relu"),
        ),
        norm=norm,
        dropout=dropout,
    )  # fmt: skip
    for name in ("activation_dropout", "prefix"):
        read.raw(name)  # of the training code; the published module has no such option
    return assemble(
        read, trunk, family="opt", layers=(layer,) * trunk.layers, norm=norm, tied=True, init_std="init_std",
        embedding=Embedding(
            positions=trunk.context + ROWS_NEVER_READ, dropout=dropout
        ),
    )  # fmt: skip

"""BLOOM (BigScience 2022, arXiv 2211.05100): linear biases of the scores, a norm of the embedding.

Source of keys and defaults: transformers `BloomConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.models.fields import Fields
from piper.models.reading.trunk import Names, Sizes, assemble, read_trunk
from piper.models.shape import Attention, DecoderShape, Embedding, FeedForward, Layer, Norm

OF_THE_TRAINING_CODE = (
    "n_embed", "n_inner", "slow_but_exact", "skip_bias_add", "skip_bias_add_qkv", "bias_dropout_fusion",
    "attention_softmax_in_fp32", "masked_softmax_fusion", "offset_alibi",
)  # fmt: skip
"""Keys of published files that the published module does not follow."""


def read(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a `config.json` object; raises ModelError naming the field."""
    read = Fields(config, where=where)
    names = Names(
        hidden="hidden_size" if read.has("hidden_size") or not read.has("n_embed") else "n_embed",
        layers="num_hidden_layers" if read.has("num_hidden_layers") else "n_layer",
        heads="num_attention_heads" if read.has("num_attention_heads") else "n_head",
        kv_heads=None, head_dim=None, context="seq_length",
    )  # fmt: skip
    trunk = read_trunk(read, Sizes(context=2048), names=names)
    read.refuse("apply_residual_connection_post_layernorm", unless=False)
    for name in OF_THE_TRAINING_CODE:
        read.raw(name)
    norm = Norm(kind="layer", eps=read.number("layer_norm_epsilon", default=1e-5), bias=True)
    layer = Layer(
        attention=Attention(
            heads=trunk.heads, kv_heads=trunk.heads, head_dim=trunk.head_dim, qkv_bias=True, out_bias=True,
            fused_qkv=True, alibi=True, dropout=read.share("attention_dropout", default=0.0),
        ),
        feed_forward=FeedForward(
            width=4 * trunk.hidden, activation="gelu_tanh", gated=False, up_bias=True, down_bias=True
        ),
        norm=norm,
        dropout=read.share("hidden_dropout", default=0.0),
    )  # fmt: skip
    return assemble(
        read, trunk, family="bloom", layers=(layer,) * trunk.layers, norm=norm, tied=True,
        embedding=Embedding(norm=norm),
    )  # fmt: skip

"""GPT-2 (Radford et al. 2019) and what keeps its form: GPT-3, Megatron's GPT, GPT-BigCode.

Source of keys and defaults: transformers `GPT2Config`, `GPTBigCodeConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.models.fields import Fields
from piper.models.reading.trunk import ACTIVATIONS, Names, Sizes, assemble, read_trunk
from piper.models.shape import Attention, DecoderShape, Embedding, FeedForward, Layer, Norm

NAMES = Names(
    hidden="n_embd", layers="n_layer", heads="n_head", kv_heads=None, head_dim=None, context="n_positions"
)


def read(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a `config.json` object; raises ModelError naming the field."""
    read = Fields(config, where=where)
    read.refuse("add_cross_attention", unless=False)
    read.refuse("scale_attn_by_inverse_layer_idx", unless=False)
    big_code = config.get("model_type") == "gpt_bigcode"
    trunk = read_trunk(read, Sizes(context=1024), names=NAMES)
    kv_heads = 1 if big_code and read.flag("multi_query", default=True) else trunk.heads
    norm = Norm(kind="layer", eps=read.number("layer_norm_epsilon", default=1e-5), bias=True)
    layer = Layer(
        attention=Attention(
            heads=trunk.heads, kv_heads=kv_heads, head_dim=trunk.head_dim, qkv_bias=True, out_bias=True,
            fused_qkv=True, dropout=read.share("attn_pdrop", default=0.1),
            scale=None if read.flag("scale_attn_weights", default=True) else 1.0,
        ),
        feed_forward=FeedForward(
            width=read.count("n_inner", default=4 * trunk.hidden), gated=False, up_bias=True, down_bias=True,
            activation=read.choice(
                "activation_function", ACTIVATIONS, default="gelu_pytorch_tanh" if big_code else "gelu_new"
            ),
        ),
        norm=norm,
        dropout=read.share("resid_pdrop", default=0.1),
    )  # fmt: skip
    embedding = Embedding(positions=trunk.context, dropout=read.share("embd_pdrop", default=0.1))
    return assemble(
        read, trunk, family="gpt2", layers=(layer,) * trunk.layers, norm=norm, tied=True, embedding=embedding
    )

"""Falcon (Almazrouei et al. 2023, arXiv 2311.16867): both parts side by side, few heads of keys and values.

Source of keys and defaults: transformers `FalconConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.models.fields import Fields
from piper.models.reading.rope import read_rotary
from piper.models.reading.trunk import ACTIVATIONS, Names, Sizes, Trunk, assemble, read_placement, read_trunk
from piper.models.shape import Attention, DecoderShape, FeedForward, Layer, Norm

TWO = 2
"""Norms of a layer whose parts each have their own."""


def read(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a `config.json` object; raises ModelError naming the field."""
    read = Fields(config, where=where)
    read.refuse("apply_residual_connection_post_layernorm", unless=False)
    names = Names(
        layers="n_layer" if read.has("n_layer") else "num_hidden_layers",
        heads="n_head" if read.has("n_head") else "num_attention_heads",
        kv_heads=None, head_dim=None,
    )  # fmt: skip
    trunk = read_trunk(read, Sizes(context=2048), names=names)
    norm = Norm(kind="layer", eps=read.number("layer_norm_epsilon", default=1e-5), bias=True)
    bias, alibi = read.flag("bias", default=False), read.flag("alibi", default=False)
    new = read.flag("new_decoder_architecture", default=False)
    norms = read.count("num_ln_in_parallel_attn", default=2 if new else 1)
    read.require(norms in (1, TWO), "num_ln_in_parallel_attn", value=norms, rule="must be 1 or 2")
    parallel = read.flag("parallel_attn", default=True)
    rotary = None if alibi else read_rotary(read, head_dim=trunk.head_dim, context=trunk.context)
    layer = Layer(
        attention=Attention(
            heads=trunk.heads, kv_heads=_kv_heads(read, trunk, new=new), head_dim=trunk.head_dim,
            qkv_bias=bias, out_bias=bias, fused_qkv=True, rotary=rotary, alibi=alibi,
            dropout=read.share("attention_dropout", default=0.0),
        ),
        feed_forward=FeedForward(
            width=read.count("ffn_hidden_size", default=4 * trunk.hidden), gated=False, up_bias=bias,
            down_bias=bias, activation=read.choice("activation", ACTIVATIONS, default="gelu"),
        ),
        norm=norm,
        placement=read_placement(parallel=parallel or new, shared=not (new and norms == TWO)),
        dropout=read.share("hidden_dropout", default=0.0),
    )  # fmt: skip
    return assemble(read, trunk, family="falcon", layers=(layer,) * trunk.layers, norm=norm, tied=True)


def _kv_heads(read: Fields, trunk: Trunk, *, new: bool) -> int:
    """Return the heads of keys and values: stated (new form), one, or as many as queries."""
    multi_query = read.flag("multi_query", default=True)
    name = "n_head_kv" if read.has("n_head_kv") else "num_kv_heads"  # the first published files
    stated = read.count(name, default=trunk.heads) if new or read.has(name) else trunk.heads
    kv_heads = stated if new else (1 if multi_query else trunk.heads)
    read.require(trunk.heads % kv_heads == 0, name, value=kv_heads, rule=f"must divide {trunk.heads} heads")
    return kv_heads

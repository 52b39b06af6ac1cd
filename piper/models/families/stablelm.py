"""StableLM 2 (Bellagente et al. 2024, arXiv 2402.17834): layer norms, a quarter of each head rotated.

Source of keys and defaults: transformers `StableLmConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.models.fields import Fields
from piper.models.reading.rope import read_rotary
from piper.models.reading.trunk import ACTIVATIONS, Sizes, assemble, read_placement, read_trunk
from piper.models.shape import Attention, DecoderShape, FeedForward, Layer, Norm


def read(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a `config.json` object; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=4096, kv_heads=32))
    eps = read.number("layer_norm_eps", default=1e-5)
    norm = Norm(kind="layer", eps=eps, bias=True)
    normed = read.flag("qk_layernorm", default=False)
    parallel = read.flag("use_parallel_residual", default=False)
    layer = Layer(
        attention=Attention(
            heads=trunk.heads, kv_heads=trunk.kv_heads, head_dim=trunk.head_dim,
            qkv_bias=read.flag("use_qkv_bias", default=False), qk_norm_over="each" if normed else "head",
            qk_norm=Norm(kind="layer", eps=eps) if normed else None,
            rotary=read_rotary(read, head_dim=trunk.head_dim, context=trunk.context, share=0.25),
            dropout=read.share("attention_dropout", default=0.0),
        ),
        feed_forward=FeedForward(
            width=read.count("intermediate_size"),
            activation=read.choice("hidden_act", ACTIVATIONS, default="silu"),
        ),
        norm=norm,
        placement=read_placement(parallel=parallel, shared=True),
        dropout=read.share("hidden_dropout", default=0.0),
    )  # fmt: skip
    return assemble(read, trunk, family="stablelm", layers=(layer,) * trunk.layers, norm=norm, tied=False)

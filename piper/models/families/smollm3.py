"""SmolLM 3 (Hugging Face 2025): Llama whose every fourth layer rotates nothing.

Source of keys and defaults: transformers `SmolLM3Config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.models.fields import Fields
from piper.models.reading.rope import read_rotary
from piper.models.reading.trunk import ACTIVATIONS, FULL, Sizes, assemble, read_trunk, repeated
from piper.models.shape import Attention, DecoderShape, FeedForward, Layer, Norm


def read(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a `config.json` object; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=32768, kv_heads=4))
    norm = Norm(eps=read.number("rms_norm_eps", default=1e-6))
    bias, mlp_bias = read.flag("attention_bias", default=False), read.flag("mlp_bias", default=False)
    rotary = read_rotary(read, head_dim=trunk.head_dim, context=trunk.context, theta=2e6)
    read.refuse("use_sliding_window", unless=False)
    read.texts("layer_types", (FULL,), length=trunk.layers)
    for name in ("max_window_layers", "sliding_window"):
        read.raw(name)  # without meaning when no layer slides
    every = read.count("no_rope_layer_interval", default=4)
    rotates = read.whole_numbers("no_rope_layers") or tuple(
        int((number + 1) % every != 0) for number in range(trunk.layers)
    )
    read.require(
        len(rotates) == trunk.layers, "no_rope_layers", value=f"{len(rotates)} entries",
        rule=f"must have one entry for each of {trunk.layers} layers (1: it rotates)",
    )  # fmt: skip
    dropout = read.share("attention_dropout", default=0.0)
    feed_forward = FeedForward(
        width=read.count("intermediate_size"), up_bias=mlp_bias, down_bias=mlp_bias,
        activation=read.choice("hidden_act", ACTIVATIONS, default="silu"),
    )  # fmt: skip

    def layer(number: int) -> Layer:
        attention = Attention(
            heads=trunk.heads, kv_heads=trunk.kv_heads, head_dim=trunk.head_dim, qkv_bias=bias, out_bias=bias,
            rotary=rotary if rotates[number] else None, dropout=dropout,
        )  # fmt: skip
        return Layer(attention=attention, feed_forward=feed_forward, norm=norm)

    layers = repeated(trunk.layers, layer)
    return assemble(read, trunk, family="smollm3", layers=layers, norm=norm, tied=True)

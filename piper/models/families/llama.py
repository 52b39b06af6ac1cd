"""Llama 1 to 3.x: grouped queries, rotary embedding, RMS norm and SwiGLU.

Source of keys and defaults: transformers `LlamaConfig` (version 4: `rope_theta`, `rope_scaling`; version 5:
`rope_parameters`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.models.families.reading import checked, read_heads, read_layers, read_rotary
from piper.models.fields import Fields, require
from piper.models.shape import Attention, DecoderShape, FeedForward, Head, Layer, Norm


def read(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a `config.json` object; raises ModelError naming the field."""
    fields = Fields(config, where=where)
    hidden = fields.count("hidden_size")
    heads, kv_heads, head_dim = read_heads(config, fields, where=where, hidden=hidden)
    layers = read_layers(fields, where=where)
    activation = config.get("hidden_act", "silu")
    require(
        activation == "silu",
        where=where,
        field="hidden_act",
        value=activation,
        rule="must be silu for a Llama model",
    )
    width, vocabulary = fields.count("intermediate_size"), fields.count("vocab_size")
    context = fields.count("max_position_embeddings", default=2048)
    norm = Norm(kind="rms", eps=fields.number("rms_norm_eps", default=1e-6))
    rotary = read_rotary(config, fields, where=where, dims=head_dim)
    head = Head(tied=fields.flag("tie_word_embeddings", default=False))
    attention_bias = fields.flag("attention_bias", default=False)
    mlp_bias = fields.flag("mlp_bias", default=False)
    layer = Layer(
        attention=Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            qkv_bias=attention_bias,
            out_bias=attention_bias,
            rotary=rotary,
            dropout=fields.share("attention_dropout", default=0.0),
        ),
        feed_forward=FeedForward(width=width, up_bias=mlp_bias, down_bias=mlp_bias),
        norm=norm,
        dropout=fields.share("hidden_dropout", default=0.0),
    )
    shape = DecoderShape(
        family="llama",
        hidden=hidden,
        vocabulary=vocabulary,
        layers=(layer,) * layers,
        final_norm=norm,
        head=head,
        context_length=context,
        init_std=fields.number("initializer_range", default=0.02),
        assumed=tuple(fields.assumed),
    )
    return checked(shape, where=where)

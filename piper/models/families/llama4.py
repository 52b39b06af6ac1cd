"""Llama 4 (Meta 2025), text: one expert of many beside a shared one, every fourth layer rotates nothing.

Source of keys and defaults: transformers `Llama4TextConfig`. Norms of queries and keys have no weights; that
they follow the rotation there and precede it here makes no difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.models.fields import Fields
from piper.models.reading.rope import read_rotary
from piper.models.reading.routing import read_router
from piper.models.reading.trunk import ACTIVATIONS, FULL, Sizes, Trunk, assemble, read_trunk, repeated
from piper.models.shape import Attention, DecoderShape, FeedForward, Layer, Norm, Router, SparseMoE

SIZES = Sizes(context=131072, kv_heads=8, head_dim=128, hidden=5120, layers=48, heads=40, vocabulary=202048)
CHUNKED = "chunked_attention"


def read(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read the text part of a `config.json` object; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, SIZES)
    norm = Norm(eps=read.number("rms_norm_eps", default=1e-5))
    attentions = _attentions(read, trunk, eps=norm.eps)
    activation = read.choice("hidden_act", ACTIVATIONS, default="silu")
    width = read.count("intermediate_size", default=8192)
    dense = FeedForward(width=read.count("intermediate_size_mlp", default=16384), activation=activation)
    router = Router(experts=16, top_k=1, scores="sigmoid", normalised=False, weigh_input=True)
    moe = SparseMoE(
        router=read_router(read, router, experts="num_local_experts"),
        expert=FeedForward(width=width, activation=activation),
        shared=FeedForward(width=width, activation=activation),
    )
    every = read.count("interleave_moe_layer_step", default=1)
    sparse = read.whole_numbers("moe_layers") or tuple(range(every - 1, trunk.layers, every))
    read.require(
        all(number < trunk.layers for number in sparse), "moe_layers", value=list(sparse),
        rule=f"must be numbers of {trunk.layers} layers, counted from 0",
    )  # fmt: skip

    def layer(number: int) -> Layer:
        feed_forward = moe if number in sparse else dense
        return Layer(attention=attentions[number], feed_forward=feed_forward, norm=norm)

    layers = repeated(trunk.layers, layer)
    return assemble(read, trunk, family="llama4", layers=layers, norm=norm, tied=False)


def _attentions(read: Fields, trunk: Trunk, *, eps: float) -> tuple[Attention, ...]:
    bias = read.flag("attention_bias", default=False)
    rotary = read_rotary(read, head_dim=trunk.head_dim, context=trunk.context, theta=5e5, interleaved=True)
    normed = read.flag("use_qk_norm", default=True)
    every = read.count("no_rope_layer_interval", default=4)
    rotates = read.whole_numbers("no_rope_layers") or tuple(
        int((number + 1) % every != 0) for number in range(trunk.layers)
    )
    read.require(
        len(rotates) == trunk.layers, "no_rope_layers", value=f"{len(rotates)} entries",
        rule=f"must have one entry for each of {trunk.layers} layers (1: it rotates)",
    )  # fmt: skip
    _tell_what_is_simplified(read, trunk)
    dropout = read.share("attention_dropout", default=0.0)
    return tuple(
        Attention(
            heads=trunk.heads, kv_heads=trunk.kv_heads, head_dim=trunk.head_dim, qkv_bias=bias, out_bias=bias,
            qk_norm=Norm(eps=eps, weight=False) if normed and rotating else None,
            rotary=rotary if rotating else None, dropout=dropout,
        )
        for rotating in rotates
    )  # fmt: skip


def _tell_what_is_simplified(read: Fields, trunk: Trunk) -> None:
    kinds = read.texts("layer_types", (CHUNKED, FULL), length=trunk.layers)
    chunk = read.count_or_none("attention_chunk_size", default=8192)
    if chunk is not None and (kinds is None or CHUNKED in kinds):
        read.notices.append(
            f"layers that attend within chunks of {chunk} tokens are planned as causal over the whole "
            "sequence: the same up to that length"
        )
    if read.flag("attn_temperature_tuning", default=True):
        read.notices.append(
            "the growth of queries with their position (attn_temperature_tuning) is not planned"
        )
    for name in ("floor_scale", "attn_scale", "for_llm_compression"):
        read.raw(name)

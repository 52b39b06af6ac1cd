"""Qwen 2, 2.5 and 3, dense and with experts.

Qwen 2 has biases of queries, keys and values; Qwen 3 norms of queries and keys instead, and a head width of
its own. The experts of Qwen 2 MoE stand beside a gated shared one; layers may be dense by number.

Source of keys and defaults: transformers `Qwen2Config`, `Qwen3Config`, `Qwen2MoeConfig`, `Qwen3MoeConfig`,
`Qwen2VLTextConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from piper.models.fields import Fields
from piper.models.reading.rope import read_rotary
from piper.models.reading.routing import read_router
from piper.models.reading.trunk import ACTIVATIONS, Sizes, Trunk, assemble, read_trunk, read_windows, repeated
from piper.models.shape import (
    Attention,
    DecoderShape,
    FeedForward,
    Layer,
    Norm,
    Router,
    SparseMoE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What distinguishes the members of the family.

    Args:
        sizes: defaults of sizes.
        qkv_bias: whether queries, keys and values have biases.
        norms: of queries and keys.
        router: of its experts; None: dense.
        expert_width, shared_width: defaults of experts' widths; shared_width 0: none is shared.
        eps, theta: defaults of norm and rotary embedding.
        slides: which layers have a window where it is used, by number and `max_window_layers`.
    """

    sizes: Sizes
    qkv_bias: bool = False
    norms: bool = False
    router: Router | None = None
    expert_width: int = 0
    shared_width: int = 0
    eps: float = 1e-6
    theta: float = 10000.0
    slides: Callable[[int, int], bool] = lambda number, first: number >= first


QWEN2 = Kind(sizes=Sizes(context=32768, kv_heads=32), qkv_bias=True)
QWEN3 = Kind(sizes=Sizes(context=32768, kv_heads=32, head_dim=128), norms=True)
QWEN2_MOE = Kind(
    sizes=Sizes(context=32768, kv_heads=16), qkv_bias=True,
    router=Router(experts=60, top_k=4, normalised=False), expert_width=1408, shared_width=5632,
    slides=lambda number, first: number % 2 == 0 and number < first,
)  # fmt: skip
QWEN3_MOE = Kind(
    sizes=Sizes(context=32768, kv_heads=4), norms=True,
    router=Router(experts=128, top_k=8, normalised=False), expert_width=768,
    slides=lambda number, first: True,
)  # fmt: skip
QWEN2_VL_TEXT = Kind(
    sizes=Sizes(context=32768, kv_heads=8, hidden=8192, layers=80, heads=64, vocabulary=152064),
    qkv_bias=True, eps=1e-5, theta=1e6,
)  # fmt: skip


def read_qwen2(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a Qwen 2 or 2.5 config; raises ModelError naming the field."""
    return _read(config, kind=QWEN2, family="qwen2", where=where)


def read_qwen3(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a Qwen 3 config; raises ModelError naming the field."""
    return _read(config, kind=QWEN3, family="qwen3", where=where)


def read_qwen2_moe(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a Qwen 1.5 or 2 MoE config; raises ModelError naming the field."""
    return _read(config, kind=QWEN2_MOE, family="qwen2_moe", where=where)


def read_qwen3_moe(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a Qwen 3 MoE config; raises ModelError naming the field."""
    return _read(config, kind=QWEN3_MOE, family="qwen3_moe", where=where)


def read_qwen2_vl(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read the text part of a Qwen 2 or 2.5 VL config; raises ModelError naming the field."""
    return _read(config, kind=QWEN2_VL_TEXT, family="qwen2_vl", where=where)


def _read(config: Mapping[str, Any], *, kind: Kind, family: str, where: str) -> DecoderShape:
    read = Fields(config, where=where)
    trunk = read_trunk(read, kind.sizes)
    norm = Norm(eps=read.number("rms_norm_eps", default=kind.eps))
    attention = _attention(read, trunk, kind=kind, norm=norm)
    windows = _windows(read, trunk.layers, kind=kind)
    parts = _feed_forwards(read, trunk.layers, kind=kind)

    def layer(number: int) -> Layer:
        return Layer(
            attention=replace(attention, window=windows[number]), feed_forward=parts[number], norm=norm
        )

    layers = repeated(trunk.layers, layer)
    return assemble(read, trunk, family=family, layers=layers, norm=norm, tied=False)


def _attention(read: Fields, trunk: Trunk, *, kind: Kind, norm: Norm) -> Attention:
    bias = read.flag("attention_bias", default=False) if kind.norms else False
    qkv_bias = read.flag("qkv_bias", default=True) if kind is QWEN2_MOE else kind.qkv_bias
    return Attention(
        heads=trunk.heads, kv_heads=trunk.kv_heads, head_dim=trunk.head_dim, qkv_bias=qkv_bias or bias,
        out_bias=bias, qk_norm=norm if kind.norms else None,
        rotary=read_rotary(read, head_dim=trunk.head_dim, context=trunk.context, theta=kind.theta),
        dropout=read.share("attention_dropout", default=0.0),
    )  # fmt: skip


def _windows(read: Fields, layers: int, *, kind: Kind) -> tuple[int | None, ...]:
    first = read.count_or_zero("max_window_layers", default=28)
    uses = read.flag("use_sliding_window", default=False)
    window = read.count_or_none("sliding_window", default=4096) if uses else None
    read.has("sliding_window")
    return read_windows(read, layers, window=window, slides=lambda number: kind.slides(number, first))


def _feed_forwards(read: Fields, layers: int, *, kind: Kind) -> tuple[FeedForward | SparseMoE, ...]:
    activation = read.choice("hidden_act", ACTIVATIONS, default="silu")
    if kind.router is None:
        return (FeedForward(width=read.count("intermediate_size"), activation=activation),) * layers
    dense_layers = _dense_layers(read, layers)
    shared = None
    if kind.shared_width:
        width = read.count("shared_expert_intermediate_size", default=kind.shared_width)
        shared = FeedForward(width=width, activation=activation)
    sparse = SparseMoE(
        router=read_router(read, kind.router, normalised="norm_topk_prob"),
        expert=FeedForward(
            width=read.count("moe_intermediate_size", default=kind.expert_width), activation=activation
        ),
        shared=shared,
        shared_gate=shared is not None,
    )  # fmt: skip
    if not read.has("intermediate_size") and not dense_layers:
        return (sparse,) * layers
    dense = FeedForward(width=read.count("intermediate_size"), activation=activation)
    return tuple(dense if number in dense_layers else sparse for number in range(layers))


def _dense_layers(read: Fields, layers: int) -> set[int]:
    """Return which layers have no experts: those listed, and all but every `decoder_sparse_step`-th."""
    step = read.count("decoder_sparse_step", default=1)
    listed = read.whole_numbers("mlp_only_layers")
    read.require(
        all(number < layers for number in listed), "mlp_only_layers", value=list(listed),
        rule=f"must be numbers of {layers} layers, counted from 0",
    )  # fmt: skip
    return {number for number in range(layers) if number in listed or (number + 1) % step}

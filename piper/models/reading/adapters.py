"""LoRA as `peft` states it (`adapter_config.json`), and its exact parameters."""

from __future__ import annotations

import math

from piper.models.fields import Fields
from piper.models.shape import (
    Attention,
    DecoderShape,
    FeedForward,
    LatentAttention,
    Layer,
    LowRankAdapters,
)

_NAMES_OF_THE_SAME = {
    "query_key_value": ("qkv_proj",),
    "qkv_proj": ("qkv_proj",),
    "c_attn": ("qkv_proj",),
    "Wqkv": ("qkv_proj",),
    "dense": ("o_proj",),
    "out_proj": ("o_proj",),
    "wo": ("o_proj",),
}
"""Names of projections in other modules, by what they are called here."""

_WITHOUT_MEANING = (
    "auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights", "peft_version",
    "revision", "task_type", "fan_in_fan_out", "loftq_config", "megatron_config", "megatron_core",
    "layer_replication", "eva_config", "corda_config",
)  # fmt: skip


def read_adapters(read: Fields, shape: DecoderShape) -> LowRankAdapters:
    """Return the adapters that an object of `peft` states; raises ModelError."""
    read.choice("peft_type", {"LORA": True}, default="LORA")
    for name in ("use_dora", "lora_bias", "use_qalora"):
        read.refuse(name, unless=False)
    read.refuse("bias", unless="none")
    for name in ("modules_to_save", "layers_to_transform", "layers_pattern", "exclude_modules"):
        read.refuse(name, unless=[])
    for name in ("rank_pattern", "alpha_pattern"):
        read.refuse(name, unless={})
    for name in _WITHOUT_MEANING:
        read.raw(name)
    rank = read.count("r", default=8)
    alpha = read.number("lora_alpha", default=8.0)
    if read.flag("use_rslora", default=False):
        alpha *= math.sqrt(rank)  # the product counts alpha / sqrt(rank) (arXiv 2312.03732)
    return LowRankAdapters(
        rank=rank, alpha=alpha, targets=_targets(read, shape), dropout=read.share("lora_dropout", default=0.0)
    )


def adapter_parameters(shape: DecoderShape) -> int:
    """Return the exact number of parameters of the adapters: rank (inputs + outputs) for each projection."""
    if shape.adapters is None:
        return 0
    targets, rank = shape.adapters.targets, shape.adapters.rank
    layers = (*shape.layers, *(shape.layers[-1:] * shape.prediction_depth))
    return sum(
        rank * (inputs + outputs)
        for layer in layers
        for name, (inputs, outputs) in _of_layer(layer, shape.hidden).items()
        if name in targets
    )


def projections(shape: DecoderShape) -> list[str]:
    """Return the names of linear layers that may have an adapter, in order."""
    names: dict[str, None] = {}
    for layer in dict.fromkeys(shape.layers):
        names |= dict.fromkeys(_of_layer(layer, shape.hidden))
    return list(names)


Sizes = dict[str, tuple[int, int]]
"""Projection -> its inputs and outputs."""


def _of_layer(layer: Layer, hidden: int) -> Sizes:
    attention, part = layer.attention, layer.feed_forward
    found = (
        _of_attention(attention, hidden)
        if isinstance(attention, Attention)
        else _of_latent(attention, hidden)
    )
    if isinstance(part, FeedForward):
        return found | _of_feed_forward(part, hidden)
    return found if part.shared is None else found | _of_feed_forward(part.shared, hidden)


def _of_attention(part: Attention, hidden: int) -> Sizes:
    query, key_value = part.heads * part.head_dim, part.kv_heads * part.head_dim
    if part.fused_qkv:
        return {"qkv_proj": (hidden, query + 2 * key_value), "o_proj": (query, hidden)}
    return {
        "q_proj": (hidden, query),
        "k_proj": (hidden, key_value),
        "v_proj": (hidden, key_value),
        "o_proj": (query, hidden),
    }


def _of_latent(part: LatentAttention, hidden: int) -> Sizes:
    query = part.heads * (part.nope_dim + part.rope_dim)
    down = {"kv_a_proj_with_mqa": (hidden, part.kv_rank + part.rope_dim)}
    up = {"kv_b_proj": (part.kv_rank, part.heads * (part.nope_dim + part.value_dim))}
    out = {"o_proj": (part.heads * part.value_dim, hidden)}
    if part.query_rank is None:
        return {"q_proj": (hidden, query)} | down | up | out
    queries = {"q_a_proj": (hidden, part.query_rank), "q_b_proj": (part.query_rank, query)}
    return queries | down | up | out


def _of_feed_forward(part: FeedForward, hidden: int) -> Sizes:
    down = {"down_proj": (part.width, hidden)}
    if not part.gated:
        return {"up_proj": (hidden, part.width)} | down
    if part.fused_gate:
        return {"gate_up_proj": (hidden, 2 * part.width)} | down
    return {"gate_proj": (hidden, part.width), "up_proj": (hidden, part.width)} | down


def _targets(read: Fields, shape: DecoderShape) -> tuple[str, ...]:
    known = projections(shape)
    given = read.raw("target_modules")
    if given is None:
        given = [name for name in known if name in ("q_proj", "v_proj", "qkv_proj")]
        read.assumed.append(f"target_modules = {', '.join(given)}")
    if given == "all-linear":
        return tuple(known)
    read.require(
        isinstance(given, list) and all(isinstance(name, str) for name in given) and bool(given),
        "target_modules", value=given, rule='must be a list of names of projections, or "all-linear"',
        fix=f"this model has {', '.join(known)}",
    )  # fmt: skip
    found: dict[str, None] = {}
    for name in given:
        ours = [name] if name in known else [own for own in _NAMES_OF_THE_SAME.get(name, ()) if own in known]
        read.require(
            bool(ours), "target_modules", value=name, rule="is no projection of this model",
            fix=f"it has {', '.join(known)}; routed experts have no adapters",
        )  # fmt: skip
        found |= dict.fromkeys(ours)
    return tuple(found)

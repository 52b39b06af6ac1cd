"""LoRA as `peft` states it (`adapter_config.json`), and parts that are not trained at all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from piper.models.fields import Fields
from piper.models.shape import Attention, DecoderShape, FeedForward, Layer, LowRankAdapters, SparseMoE

ADAPTERS, FROZEN = "adapter_config", "frozen"
"""Keys of a config beside those of its family: an object as in `adapter_config.json`; a list of names."""

FIRST_NAMES = ("model.embed_tokens", "model.embed_positions", "model.layers", "model.norm", "lm_head")

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


def with_adapters(shape: DecoderShape, config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Return the shape with what the config says of adapters and frozen parts; raises ModelError."""
    outer = Fields(config, where=where)
    read = outer.inner(ADAPTERS)
    frozen = _frozen(outer)
    if read is None:
        return replace(shape, frozen=frozen)
    adapters = _adapters(read, shape)
    assumed = tuple(note for note in read.assumed if note not in shape.assumed)
    return replace(shape, adapters=adapters, frozen=frozen, assumed=(*shape.assumed, *assumed))


def projections(shape: DecoderShape) -> dict[str, None]:
    """Return the names of linear layers that may have an adapter, in order."""
    names: dict[str, None] = {}
    for layer in dict.fromkeys(shape.layers):
        names |= dict.fromkeys(_of_layer(layer))
    return names


def _of_layer(layer: Layer) -> list[str]:
    attention, feed_forward = layer.attention, layer.feed_forward
    if isinstance(attention, Attention):
        names = ["qkv_proj"] if attention.fused_qkv else ["q_proj", "k_proj", "v_proj"]
    else:
        names = ["q_proj"] if attention.query_rank is None else ["q_a_proj", "q_b_proj"]
        names += ["kv_a_proj_with_mqa", "kv_b_proj"]
    names.append("o_proj")
    if isinstance(feed_forward, FeedForward):
        names += _of_feed_forward(feed_forward)
    elif isinstance(feed_forward, SparseMoE) and feed_forward.shared is not None:
        names += _of_feed_forward(feed_forward.shared)
    return names


def _of_feed_forward(part: FeedForward) -> list[str]:
    if not part.gated:
        return ["up_proj", "down_proj"]
    return ["gate_up_proj", "down_proj"] if part.fused_gate else ["gate_proj", "up_proj", "down_proj"]


def _frozen(outer: Fields) -> tuple[str, ...]:
    names = outer.raw(FROZEN)
    if names is None:
        return ()
    outer.require(
        isinstance(names, list) and all(isinstance(name, str) for name in names), FROZEN, value=names,
        rule="must be a list of names of parameters", fix='write for example ["model.embed_tokens"]',
    )  # fmt: skip
    for name in names:
        outer.require(
            name.startswith(FIRST_NAMES), FROZEN, value=name, rule="begins no parameter's name",
            fix=f"names begin with {', '.join(FIRST_NAMES)} (layers: model.layers.0. and so on)",
        )  # fmt: skip
    return tuple(names)


def _adapters(read: Fields, shape: DecoderShape) -> LowRankAdapters:
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


def _targets(read: Fields, shape: DecoderShape) -> tuple[str, ...]:
    known = list(projections(shape))
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

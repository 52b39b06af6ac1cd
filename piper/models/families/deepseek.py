"""DeepSeek V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437): latent attention, shared experts.

Source of keys and defaults: transformers `DeepseekV2Config`, `DeepseekV3Config`; `moe_layer_freq`,
`scoring_func` and `aux_loss_alpha` from the published files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from piper.models.fields import Fields
from piper.models.reading.rope import read_rotary, yarn_mscale
from piper.models.reading.routing import read_router
from piper.models.reading.trunk import ACTIVATIONS, Names, Sizes, Trunk, assemble, read_trunk, repeated
from piper.models.shape import (
    Attention,
    DecoderShape,
    FeedForward,
    LatentAttention,
    Layer,
    Norm,
    Router,
    SparseMoE,
)

NAMES = Names(kv_heads=None, head_dim=None, several_widths=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What a family takes for what a file leaves out.

    Args:
        family: of the shape.
        router: of the experts.
        dense, shared: how many first layers have no experts; how many experts take every token.
        width: of an expert.
        eps: of the norms.
    """

    family: str
    router: Router
    dense: int
    shared: int
    width: int
    eps: float = 1e-6


def read_v2(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a DeepSeek V2 config; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=2048), names=NAMES)
    group_limited = {"greedy": False, "group_limited_greedy": True}
    limited = read.choice("topk_method", group_limited, default="greedy")
    router = Router(experts=64, top_k=6, normalised=False)
    router = grouped(read, router) if limited else router
    defaults = Defaults(family="deepseek_v2", router=router, dense=0, shared=2, width=1407)
    return read_with_experts(read, trunk, defaults, attention=_attention)


def read_v3(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a DeepSeek V3 or R1 config; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=4096), names=NAMES)
    read.choice("topk_method", {"noaux_tc": True}, default="noaux_tc")
    router = Router(
        experts=256, top_k=8, scores="sigmoid", normalised=True, scaling=2.5, groups=8, groups_kept=4,
        group_score="top2", correction_bias=True,
    )  # fmt: skip
    defaults = Defaults(family="deepseek_v3", router=grouped(read, router), dense=3, shared=1, width=2048)
    return read_with_experts(read, trunk, defaults, attention=_attention)


def read_with_experts(
    read: Fields,
    trunk: Trunk,
    defaults: Defaults,
    *,
    attention: Callable[[Fields, Trunk, Norm], Attention | LatentAttention],
) -> DecoderShape:
    """Return the shape of a decoder whose layers have experts and a shared one, all but the first ones.

    `attention`: reads it, given the norm of the layers.
    """
    norm = Norm(eps=read.number("rms_norm_eps", default=defaults.eps))
    attending = attention(read, trunk, norm)
    activation = read.choice("hidden_act", ACTIVATIONS, default="silu")
    width = read.count("moe_intermediate_size", default=defaults.width)
    none = read.is_null("n_shared_experts")
    shared = 0 if none else read.count_or_zero("n_shared_experts", default=defaults.shared)
    router = defaults.router
    _routing_keys(read, router)
    moe = SparseMoE(
        router=read_router(
            read,
            replace(router, scaling=read.number("routed_scaling_factor", default=router.scaling)),
            experts="n_routed_experts", normalised="norm_topk_prob",
        ),
        expert=FeedForward(width=width, activation=activation),
        shared=FeedForward(width=width * shared, activation=activation) if shared else None,
    )  # fmt: skip
    first = read.count_or_zero("first_k_dense_replace", default=defaults.dense)
    every = read.count("moe_layer_freq", default=1)
    feed_forward = FeedForward(width=read.count("intermediate_size"), activation=activation)

    def layer(number: int) -> Layer:
        sparse = number >= first and number % every == 0
        return Layer(attention=attending, feed_forward=moe if sparse else feed_forward, norm=norm)

    layers = repeated(trunk.layers, layer)
    if any(isinstance(each.feed_forward, SparseMoE) for each in set(layers)):
        _check_groups(read, moe.router)
    depth = read.count_or_zero("num_nextn_predict_layers", default=0)
    found = assemble(
        read, trunk, family=defaults.family, layers=layers, norm=norm, tied=False, prediction_depth=depth
    )
    if not depth:
        return found
    extra = found.n_parameters - replace(found, prediction_depth=0).n_parameters
    notice = (
        f"{extra} of the parameters belong to multi-token prediction (num_nextn_predict_layers = {depth}); "
        "0 leaves it out"
    )
    return replace(found, notices=(*found.notices, notice))


def _attention(read: Fields, trunk: Trunk, norm: Norm) -> LatentAttention:
    nope, rope = read.count("qk_nope_head_dim", default=128), read.count("qk_rope_head_dim", default=64)
    kv_heads = read.count("num_key_value_heads", default=trunk.heads)
    read.require(
        kv_heads == trunk.heads, "num_key_value_heads", value=kv_heads,
        rule=f"must be {trunk.heads} (num_attention_heads): latent attention has as many",
    )  # fmt: skip
    if read.has("head_dim"):
        stated = read.count("head_dim")
        read.require(
            stated in (rope, nope + rope), "head_dim", value=stated,
            rule=f"contradicts qk_rope_head_dim = {rope} and qk_nope_head_dim = {nope}",
            fix="leave head_dim out: latent attention states its widths in those keys",
        )  # fmt: skip
    rotary = read_rotary(
        read, head_dim=rope, context=trunk.context, interleaved=read.flag("rope_interleave", default=True)
    )
    scale = None
    scaling = read.inner("rope_scaling") or read.inner("rope_parameters")
    if rotary.scaling is not None and scaling is not None and scaling.raw("mscale_all_dim"):
        # The temperature of yarn is put into the scores, squared (DeepSeek-V2, section 3.1.4).
        scale = (nope + rope) ** -0.5 * yarn_mscale(
            rotary.scaling.factor, scaling.number("mscale_all_dim")
        ) ** 2
    return LatentAttention(
        heads=trunk.heads, query_rank=read.count_or_none("q_lora_rank", default=1536),
        kv_rank=read.count("kv_lora_rank", default=512), nope_dim=nope, rope_dim=rope,
        value_dim=read.count("v_head_dim", default=128), bias=read.flag("attention_bias", default=False),
        norm=Norm(eps=1e-6), rotary=rotary, scale=scale, dropout=read.share("attention_dropout", default=0.0),
    )  # fmt: skip


def grouped(read: Fields, router: Router) -> Router:
    """Return the router with the groups that a config states."""
    groups = read.count("n_group", default=router.groups)
    kept = read.count("topk_group", default=min(router.groups_kept, groups))
    return replace(router, groups=groups, groups_kept=kept)


def _check_groups(read: Fields, router: Router) -> None:
    read.require(
        router.experts % router.groups == 0, "n_group", value=router.groups,
        rule=f"must divide {router.experts} experts (n_routed_experts)",
    )  # fmt: skip
    read.require(
        router.groups_kept <= router.groups, "topk_group", value=router.groups_kept,
        rule=f"is more than {router.groups} groups (n_group)",
    )  # fmt: skip
    within = router.groups_kept * router.experts // router.groups
    read.require(
        router.top_k <= within, "num_experts_per_tok", value=router.top_k,
        rule=f"is more than the {within} experts of {router.groups_kept} groups (topk_group)",
    )  # fmt: skip


def _routing_keys(read: Fields, router: Router) -> None:
    """Look at keys that must agree with the family, or that cost nothing that is planned."""
    scores = {"softmax": "softmax", "sigmoid": "sigmoid"}
    found = read.choice("scoring_func", scores, default=router.scores)
    read.require(
        found == router.scores, "scoring_func", value=found, rule=f"must be {router.scores} in this family"
    )
    for name in ("n_group", "topk_group", "ep_size", "num_key_value_heads"):
        read.raw(name)
    per_sequence, weight = read.raw("seq_aux"), read.raw("aux_loss_alpha")
    if weight or (per_sequence and weight is None):
        read.notices.append("the auxiliary loss over experts (aux_loss_alpha) is not planned")

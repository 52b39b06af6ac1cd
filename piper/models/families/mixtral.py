"""Mixtral: Llama's decoder with sparse experts in place of the feed-forward part.

Source of keys and defaults: transformers `MixtralConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from piper.errors import ModelError
from piper.models.families import llama
from piper.models.families.reading import MOST_EXPERTS, checked
from piper.models.fields import Fields, require
from piper.models.shape import DecoderShape, FeedForward, Router, SparseMoE

_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
"""Where Mixtral's defaults are not Llama's."""

_UNSUPPORTED = {"sliding_window": None, "router_jitter_noise": 0.0, "output_router_logits": False}
"""Options of the family that this module does not have, with the value that leaves them out."""


def read(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a `config.json` object; raises ModelError naming the field."""
    _refuse_unsupported(config, where=where)
    filled = {name: value for name, value in _DEFAULTS.items() if config.get(name) is None}
    if isinstance(config.get("rope_parameters"), Mapping) and "rope_theta" in config["rope_parameters"]:
        filled.pop("rope_theta", None)
    dense = llama.read({**config, **filled}, where=where)
    fields = Fields(config, where=where)
    experts = fields.count("num_local_experts", default=8)
    top_k = fields.count("num_experts_per_tok", default=2)
    require(
        experts <= MOST_EXPERTS,
        where=where,
        field="num_local_experts",
        value=experts,
        rule=f"must be <= {MOST_EXPERTS}",
    )
    require(
        top_k <= experts,
        where=where,
        field="num_experts_per_tok",
        value=top_k,
        rule=f"is more than {experts} experts",
    )
    (layer,) = set(dense.layers)
    width = fields.count("intermediate_size")
    sparse = SparseMoE(router=Router(experts=experts, top_k=top_k), expert=FeedForward(width=width))
    assumed = (*(f"{name} = {value}" for name, value in filled.items()), *dense.assumed, *fields.assumed)
    shape = replace(
        dense,
        family="mixtral",
        layers=(replace(layer, feed_forward=sparse),) * len(dense.layers),
        assumed=assumed,
    )
    return checked(shape, where=where)


def _refuse_unsupported(config: Mapping[str, Any], *, where: str) -> None:
    for name, without in _UNSUPPORTED.items():
        value = config.get(name)
        if value is not None and value != without:
            raise ModelError(
                where=where, field=name, value=value, rule="is not supported",
                fix=f"leave it out, or set it to {'null' if without is None else str(without).lower()}",
            )  # fmt: skip

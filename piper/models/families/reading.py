"""What several families read alike: the rotary embedding, and limits of any decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.models.fields import Fields, require
from piper.models.shape import DecoderShape, RopeScaling, Rotary

MOST_LAYERS = 10_000
MOST_EXPERTS = 10_000
MOST_PARAMETERS = 2**50
"""Far beyond any model; sizes in bytes stay within 64 bits, and a slip of the keyboard is told at once."""


def checked(shape: DecoderShape, *, where: str) -> DecoderShape:
    """Return the shape; raises ModelError when it has too many parameters to be meant."""
    total = shape.n_parameters
    require(
        total <= MOST_PARAMETERS,
        where=where,
        field="number of parameters",
        value=total,
        rule="is more than 2^50",
    )
    return shape


def read_layers(read: Fields, *, where: str) -> int:
    """Return the number of layers."""
    layers = read.count("num_hidden_layers")
    require(
        layers <= MOST_LAYERS,
        where=where,
        field="num_hidden_layers",
        value=layers,
        rule=f"must be at most {MOST_LAYERS}",
    )
    return layers


def read_heads(
    config: Mapping[str, Any], read: Fields, *, where: str, hidden: int, kv_heads: int | None = None
) -> tuple[int, int, int]:
    """Return heads, heads of keys and values, and the features of each.

    Args:
        config: as published.
        read: of the config.
        where: for messages.
        hidden: features of the residual stream.
        kv_heads: where the config says nothing; None: as many as heads.
    """
    heads = read.count("num_attention_heads")
    kv = read.count("num_key_value_heads", default=kv_heads or heads)
    require(
        heads % kv == 0,
        where=where,
        field="num_key_value_heads",
        value=kv,
        rule=f"must divide {heads} heads",
    )
    if config.get("head_dim") is None:
        require(
            hidden % heads == 0,
            where=where,
            field="num_attention_heads",
            value=heads,
            rule=f"must divide {hidden} (hidden_size)",
        )
    head_dim = read.count("head_dim", default=hidden // heads)
    require(
        head_dim % 2 == 0,
        where=where,
        field="head_dim",
        value=head_dim,
        rule="must be even (rotary embedding)",
    )
    return heads, kv, head_dim


def read_rotary(
    config: Mapping[str, Any], read: Fields, *, where: str, dims: int, theta: float = 10000.0
) -> Rotary:
    """Return the rotary embedding of `dims` features.

    Args:
        config: as published; transformers 4 has `rope_theta` and `rope_scaling`, 5 has `rope_parameters`.
        read: of the config.
        where: for messages.
        dims: rotated features of a head.
        theta: where the config says nothing.
    """
    return Rotary(
        theta=_theta(config, read, where=where, default=theta),
        dims=dims,
        scaling=_scaling(config, where=where),
    )


def _theta(config: Mapping[str, Any], read: Fields, *, where: str, default: float) -> float:
    nested = config.get("rope_parameters")
    if isinstance(nested, Mapping) and "rope_theta" in nested:
        return Fields(nested, where=where, prefix="rope_parameters.").number("rope_theta")
    return read.number("rope_theta", default=default)


def _scaling(config: Mapping[str, Any], *, where: str) -> RopeScaling | None:
    key = "rope_scaling" if config.get("rope_scaling") is not None else "rope_parameters"
    scaling = config.get(key)
    if scaling is None:
        return None
    require(
        isinstance(scaling, Mapping), where=where, field=key, value=scaling, rule="must be an object or null"
    )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    require(
        kind in ("linear", "llama3"),
        where=where,
        field=f"{key}.rope_type",
        value=kind,
        rule="must be default, linear or llama3",
    )
    read = Fields(scaling, where=where, prefix=f"{key}.")
    factor = read.number("factor")
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    low, high = read.number("low_freq_factor"), read.number("high_freq_factor")
    require(
        low < high,
        where=where,
        field=f"{key}.low_freq_factor",
        value=low,
        rule=f"must be less than high_freq_factor = {high}",
    )
    original = read.count("original_max_position_embeddings")
    return RopeScaling(
        kind="llama3", factor=factor, low_freq_factor=low, high_freq_factor=high, original_context=original
    )

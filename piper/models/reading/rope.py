"""Rotary embedding as `config.json` states it, in both forms that transformers has used.

Version 4: `rope_theta`, `rope_scaling`, `partial_rotary_factor`. Version 5: all of it in `rope_parameters`,
or there once per kind of layer.
"""

from __future__ import annotations

import math

from piper.models.fields import Fields
from piper.models.shape import RopeScaling, Rotary


def read_rotary(
    read: Fields, *, head_dim: int, context: int, theta: float = 10000.0, share: float = 1.0,
    interleaved: bool = False, kind_of_layer: str | None = None,
) -> Rotary:  # fmt: skip
    """Return the rotary embedding; raises ModelError naming the field.

    Args:
        read: the config.
        head_dim: features of each head.
        context: `max_position_embeddings`, where a scaling does not name its own original context.
        theta, share: what the family takes for the base of the frequencies and the rotated share of a head.
        interleaved: pairs are (2i, 2i + 1).
        kind_of_layer: key inside `rope_parameters` where layers differ ("full_attention").
    """
    nested = read.inner("rope_parameters")
    if nested is not None and kind_of_layer is not None:
        nested = nested.inner(kind_of_layer) or nested
    rotated = _rotated_share(read, nested, default=share)
    dims = int(head_dim * rotated)
    read.require(
        dims > 0 and dims % 2 == 0, "head_dim", value=head_dim,
        rule=f"must rotate an even number of features (rotary embedding), not {dims}",
    )  # fmt: skip
    read.raw("original_max_position_embeddings")
    scaling = nested if nested is not None and _kind(nested) else read.inner("rope_scaling")
    return Rotary(
        theta=_theta(read, nested, default=theta),
        dims=dims,
        interleaved=interleaved,
        scaling=None if scaling is None else _scaling(scaling, read, context=context, dims=dims),
    )


def _kind(scaling: Fields) -> object:
    value = scaling.raw("rope_type")
    return scaling.raw("type") if value is None else value


def _theta(read: Fields, nested: Fields | None, *, default: float) -> float:
    read.raw("rope_theta")
    if nested is not None and nested.has("rope_theta"):
        return nested.number("rope_theta")
    return read.number("rope_theta", default=default)


def _rotated_share(read: Fields, nested: Fields | None, *, default: float) -> float:
    read.raw("partial_rotary_factor")
    for source in (nested, read):
        if source is not None and source.has("partial_rotary_factor"):
            share = source.number("partial_rotary_factor")
            source.require(
                share <= 1, "partial_rotary_factor", value=share, rule="must be a share of a head, at most 1"
            )
            return share
    return default


def _scaling(scaling: Fields, read: Fields, *, context: int, dims: int) -> RopeScaling | None:
    scaling.seen.update(("rope_type", "type"))
    name = "type" if scaling.raw("rope_type") is None else "rope_type"
    readers = {
        "default": None, "mrope": None, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3,
        "yarn": _yarn, "longrope": _longrope, "su": _longrope,
    }  # fmt: skip
    reader = scaling.choice(name, readers, default="default")
    if reader is None:
        return None
    own = (
        read.count("original_max_position_embeddings")
        if read.has("original_max_position_embeddings")
        else None
    )
    original = own or scaling.count("original_max_position_embeddings", default=context)
    found: RopeScaling = reader(scaling, original=original, context=context, dims=dims)
    scaling.require(found.factor >= 1, "factor", value=found.factor, rule="must stretch: be at least 1")
    return found


def _linear(scaling: Fields, *, original: int, context: int, dims: int) -> RopeScaling:
    return RopeScaling(kind="linear", factor=scaling.number("factor"))


def _dynamic(scaling: Fields, *, original: int, context: int, dims: int) -> RopeScaling:
    return RopeScaling(kind="dynamic", factor=scaling.number("factor"), original_context=original)


def _llama3(scaling: Fields, *, original: int, context: int, dims: int) -> RopeScaling:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    scaling.require(
        low < high, "low_freq_factor", value=low, rule=f"must be less than high_freq_factor = {high}"
    )
    return RopeScaling(
        kind="llama3", factor=scaling.number("factor"), low_freq_factor=low, high_freq_factor=high,
        original_context=scaling.count("original_max_position_embeddings", default=original),
    )  # fmt: skip


def _yarn(scaling: Fields, *, original: int, context: int, dims: int) -> RopeScaling:
    factor = scaling.number("factor", default=context / original)
    return RopeScaling(
        kind="yarn", factor=factor, original_context=original,
        beta_fast=scaling.number("beta_fast", default=32.0),
        beta_slow=scaling.number("beta_slow", default=1.0),
        attention_factor=_yarn_attention(scaling, factor), truncate=scaling.flag("truncate", default=True),
    )  # fmt: skip


def _yarn_attention(scaling: Fields, factor: float) -> float:
    """Return the factor of cosine and sine (arXiv 2309.00071, eq. 22; DeepSeek-V2's two factors of it)."""
    if scaling.has("attention_factor"):
        return scaling.number("attention_factor")
    mscale, all_dims = scaling.raw("mscale"), scaling.raw("mscale_all_dim")
    if mscale and all_dims:
        return yarn_mscale(factor, scaling.number("mscale")) / yarn_mscale(
            factor, scaling.number("mscale_all_dim")
        )
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """Return 1 + 0.1 weight ln(factor) (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(scaling: Fields, *, original: int, context: int, dims: int) -> RopeScaling:
    short, long = scaling.numbers("short_factor"), scaling.numbers("long_factor")
    for name, factors in (("short_factor", short), ("long_factor", long)):
        scaling.require(
            len(factors) == dims // 2, name, value=f"{len(factors)} numbers",
            rule=f"must have one for each of {dims // 2} frequencies",
        )  # fmt: skip
    factor = scaling.number("factor", default=max(context / original, 1.0))
    attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    if scaling.has("attention_factor"):
        attention = scaling.number("attention_factor")
    return RopeScaling(
        kind="longrope", factor=factor, original_context=original, attention_factor=attention,
        short_factors=short, long_factors=long,
    )  # fmt: skip

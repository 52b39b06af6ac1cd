"""What must hold of any shape, however it was stated; readers of families check more, by their own keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from piper.errors import ModelError
from piper.models.reading.trunk import MOST_EXPERTS, MOST_PARAMETERS
from piper.models.shape import Attention, DecoderShape, FeedForward, LatentAttention, Layer, Router, SparseMoE


class Wrong(NamedTuple):
    """A rule that does not hold."""

    field: str
    value: object
    rule: str


def checked(shape: DecoderShape, *, where: str) -> DecoderShape:
    """Return the shape; raises ModelError with the first rule that does not hold."""
    for wrong in _wrong(shape):
        raise ModelError(
            where=where, field=wrong.field, value=wrong.value, rule=wrong.rule, fix=f"correct {wrong.field}"
        )
    return shape


def _wrong(shape: DecoderShape) -> Iterator[Wrong]:
    for name in ("hidden", "vocabulary", "context_length"):
        if getattr(shape, name) < 1:
            yield Wrong(name, getattr(shape, name), "must be at least 1")
    for layer in dict.fromkeys(shape.layers):
        yield from _of_layer(layer)
    if shape.n_parameters > MOST_PARAMETERS:
        yield Wrong("number of parameters", shape.n_parameters, "is more than 2^50")


def _of_layer(layer: Layer) -> Iterator[Wrong]:
    if isinstance(layer.attention, Attention):
        yield from _of_attention(layer.attention)
    else:
        yield from _of_latent(layer.attention)
    part = layer.feed_forward
    if isinstance(part, SparseMoE):
        yield from _of_router(part.router)
        yield from _of_width(part.expert, "expert.width")
        if part.shared is not None:
            yield from _of_width(part.shared, "shared.width")
    else:
        yield from _of_width(part, "feed_forward.width")


def _of_attention(part: Attention) -> Iterator[Wrong]:
    for name in ("heads", "kv_heads", "head_dim"):
        if getattr(part, name) < 1:
            yield Wrong(f"attention.{name}", getattr(part, name), "must be at least 1")
            return
    if part.heads % part.kv_heads:
        yield Wrong("attention.kv_heads", part.kv_heads, f"must divide {part.heads} heads")
    if part.rotary is not None and (part.rotary.dims % 2 or not 0 < part.rotary.dims <= part.head_dim):
        yield Wrong("attention.rotary.dims", part.rotary.dims, f"must be even, and at most {part.head_dim}")
    if part.window is not None and part.window < 1:
        yield Wrong("attention.window", part.window, "must be at least 1")


def _of_latent(part: LatentAttention) -> Iterator[Wrong]:
    for name in ("heads", "kv_rank", "nope_dim", "rope_dim", "value_dim"):
        if getattr(part, name) < 1:
            yield Wrong(f"attention.{name}", getattr(part, name), "must be at least 1")
            return
    if part.rotary.dims != part.rope_dim or part.rope_dim % 2:
        yield Wrong(
            "attention.rotary.dims", part.rotary.dims, f"must be {part.rope_dim} (rope_dim), and even"
        )


def _of_router(router: Router) -> Iterator[Wrong]:
    if not 1 <= router.experts <= MOST_EXPERTS:
        yield Wrong("router.experts", router.experts, f"must be from 1 to {MOST_EXPERTS}")
        return
    if not 1 <= router.top_k <= router.experts:
        yield Wrong("router.top_k", router.top_k, f"must be from 1 to {router.experts} (experts)")
    if router.groups < 1 or router.experts % router.groups:
        yield Wrong("router.groups", router.groups, f"must divide {router.experts} experts")
    elif not 1 <= router.groups_kept <= router.groups:
        yield Wrong("router.groups_kept", router.groups_kept, f"must be from 1 to {router.groups} (groups)")


def _of_width(part: FeedForward, field: str) -> Iterator[Wrong]:
    if part.width < 1:
        yield Wrong(field, part.width, "must be at least 1")

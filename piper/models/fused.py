"""A shape -> the same model with fewer and larger projections, as frameworks of their own write it."""

from __future__ import annotations

from dataclasses import replace

from piper.models.shape import Attention, DecoderShape, FeedForward, LatentAttention, Layer, SparseMoE


def with_fused_projections(shape: DecoderShape) -> DecoderShape:
    """Return the model with one matrix for queries, keys and values, and one for gate and up projection.

    The parameters are as many as before. What has adapters (they name projections), normalises all heads
    together or compresses keys and values first stays as it is.
    """
    if shape.adapters is not None:
        return shape
    changed = {id(layer): _layer(layer) for layer in shape.layers}
    return replace(shape, layers=tuple(changed[id(layer)] for layer in shape.layers))


def _layer(layer: Layer) -> Layer:
    return replace(
        layer, attention=_attention(layer.attention), feed_forward=_feed_forward(layer.feed_forward)
    )


def _attention(attention: Attention | LatentAttention) -> Attention | LatentAttention:
    if not isinstance(attention, Attention) or (attention.qk_norm and attention.qk_norm_over == "all"):
        return attention
    return replace(attention, fused_qkv=True)


def _feed_forward(part: FeedForward | SparseMoE) -> FeedForward | SparseMoE:
    if isinstance(part, FeedForward):
        return replace(part, fused_gate=part.gated)
    shared = None if part.shared is None else replace(part.shared, fused_gate=part.shared.gated)
    return replace(part, expert=replace(part.expert, fused_gate=part.expert.gated), shared=shared)

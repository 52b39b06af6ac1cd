"""`ModelFacts` of a decoder: the counts that reports and the MFU formula need."""

from __future__ import annotations

from collections import Counter

from piper.models.shape import Attention, DecoderShape, FeedForward, Layer, SparseMoE
from simulator.plan import LayerFacts, ModelFacts


def facts_of(shape: DecoderShape, *, name: str) -> ModelFacts:
    """Return the counts of `shape`; heads are those of its first layer.

    The head dimension of latent attention is the mean of what a score and a value multiply.
    """
    attention, depth = shape.layers[0].attention, shape.prediction_depth
    if isinstance(attention, Attention):
        head_dim = attention.head_dim
    else:
        head_dim = (attention.nope_dim + attention.rope_dim + attention.value_dim) // 2
    return ModelFacts(
        name=name,
        n_parameters=shape.n_parameters,
        n_active_parameters=shape.n_active_parameters,
        layers=len(shape.layers),
        hidden=shape.hidden,
        heads=attention.heads,
        head_dim=head_dim,
        vocabulary=shape.vocabulary,
        layer_facts=_layers(shape),
        embedding_parameters=(shape.vocabulary + (shape.embedding.positions or 0)) * shape.hidden,
        head_weights=(1 + depth) * shape.hidden * shape.vocabulary + 2 * depth * shape.hidden**2,
    )


def _layers(shape: DecoderShape) -> tuple[LayerFacts, ...]:
    """Return equal layers together; each module for further tokens has one like the last."""
    layers = [*shape.layers, *([shape.layers[-1]] * shape.prediction_depth)]
    return tuple(_layer(layer, shape.hidden, count=count) for layer, count in Counter(layers).items())


def _layer(layer: Layer, hidden: int, *, count: int) -> LayerFacts:
    attention = layer.attention
    if isinstance(attention, Attention):
        score_dim = value_dim = attention.head_dim
        window = attention.window or 0
        weights = 2 * hidden * attention.head_dim * (attention.heads + attention.kv_heads)
    else:
        score_dim, value_dim, window = attention.nope_dim + attention.rope_dim, attention.value_dim, 0
        query = attention.heads * score_dim
        weights = hidden * query if attention.query_rank is None else attention.query_rank * (hidden + query)
        weights += hidden * (attention.kv_rank + attention.rope_dim)
        weights += attention.kv_rank * attention.heads * (attention.nope_dim + value_dim)
        weights += attention.heads * value_dim * hidden
    return LayerFacts(
        count=count,
        attention_weights=weights,
        ffn_weights=_ffn_weights(layer.feed_forward, hidden),
        heads=attention.heads,
        score_dim=score_dim,
        value_dim=value_dim,
        window=window,
    )


def _ffn_weights(part: FeedForward | SparseMoE, hidden: int) -> int:
    if isinstance(part, FeedForward):
        return (3 if part.gated else 2) * hidden * part.width
    shared = 0 if part.shared is None else _ffn_weights(part.shared, hidden)
    return part.router.top_k * _ffn_weights(part.expert, hidden) + shared

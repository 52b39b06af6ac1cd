"""`ModelFacts` of a decoder: the counts that reports and the MFU formula need."""

from __future__ import annotations

from piper.models.shape import Attention, DecoderShape
from simulator.plan import ModelFacts


def facts_of(shape: DecoderShape, *, name: str) -> ModelFacts:
    """Return the counts of `shape`; heads are those of its first layer.

    The head dimension of latent attention is the mean of what a score and a value multiply.
    """
    attention = shape.layers[0].attention
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
    )

"""Multi-token prediction: modules after the last layer that predict tokens further ahead.

A module joins the stream at a position with the embedding of the token that was predicted there, and runs one
more layer; embedding and head are those of the model.

Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2, equations 21 to 25; parameter names as in its checkpoint.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from piper.annotation import annotate
from piper.models import shape as shapes
from piper.models.layer import Layer
from piper.models.norms import Norm
from piper.models.projections import Embedding, Linear

LOSS_WEIGHT = 0.3
"""Of the further losses together, in the first 10 of 14.8 trillion tokens (section 4.2; 0.1 afterwards)."""

NO_TARGET = -100
"""A label that counts for no loss (`F.cross_entropy`, `ignore_index`)."""


class Prediction(nn.Module):
    """The module that predicts the token `depth` behind the next one.

    The norm before the head is applied by the head's unit.
    """

    def __init__(self, shape: shapes.DecoderShape, *, depth: int) -> None:
        super().__init__()
        self.depth = depth
        norm = shape.final_norm or shapes.Norm()
        self.enorm = Norm(norm, shape.hidden)
        self.hnorm = Norm(norm, shape.hidden)
        self.eh_proj = Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layer = Layer(shape.layers[-1], shape.hidden, lengths=shape.segment_lengths)
        self.norm = Norm(norm, shape.hidden)

    def forward(  # noqa: PLR0917
        self, x: Tensor, labels: Tensor, embedding: Embedding, tables: tuple[Tensor, ...]
    ) -> Tensor:
        """Map the stream [microbatch, seq, hidden] to the same shape.

        Args:
            x: what the model, or the module before, made; not normalised.
            labels: [microbatch, seq]; a module takes those `depth - 1` positions ahead.
            embedding: of the model.
            tables: of the layer.
        """
        with annotate("PP"), annotate("LAYER"):
            with annotate("TP"):
                embedded = embedding(ahead(labels, self.depth - 1, fill=0))
            joined = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(x)), -1))
            return self.layer.transform(joined, tables)


def ahead(labels: Tensor, steps: int, *, fill: int) -> Tensor:
    """Return labels [microbatch, seq] moved left by `steps`, filled up at the end."""
    if not steps:
        return labels
    rest = labels.new_full((labels.shape[0], steps), fill)
    return torch.cat((labels[:, steps:], rest), dim=1)

"""The one place where hidden features become the summed token loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.models.shape import Head


def summed_loss(hidden: Tensor, labels: Tensor, *, projection: nn.Module, head: Head) -> Tensor:
    """Return the sum of the cross-entropies of all tokens, fp32.

    Args:
        hidden: [microbatch, seq, hidden], normalised.
        labels: [microbatch, seq], int64; -100: no target.
        projection: hidden features to logits.
        head: what happens to the logits.
    """
    logits = projection(hidden)
    if head.scale != 1.0:
        logits = logits * head.scale
    if head.softcap is not None:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    logits = logits.float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

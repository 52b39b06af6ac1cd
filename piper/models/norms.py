"""Norms over the last dimension.

Sources: RMS norm: Zhang, Sennrich 2019 (arXiv 1910.07467); layer norm: Ba et al. 2016 (arXiv 1607.06450).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.models import shape as shapes


class Norm(nn.Module):
    """The norm that a `shape.Norm` describes, over `width` features.

    `heads`: each has a weight of its own, [heads, width]; 0: there is one, [width].
    """

    def __init__(self, shape: shapes.Norm, width: int, *, heads: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.width = width
        size = (heads, width) if heads else (width,)
        self.weight = nn.Parameter(torch.empty(size)) if shape.weight else None
        self.bias = nn.Parameter(torch.empty(size)) if shape.bias else None

    def reset_parameters(self) -> None:
        """Start as the plain norm."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.shape.offset else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width] to the same shape."""
        weight: Tensor | None = self.weight
        if weight is not None and self.shape.offset:
            weight = weight + 1
        if weight is not None and weight.dim() > 1:
            normed = self._normed(x, None, None) * weight
            return normed if self.bias is None else normed + self.bias
        return self._normed(x, weight, self.bias)

    def _normed(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if self.shape.kind == "rms":
            return F.rms_norm(x, (self.width,), weight, self.shape.eps)
        return F.layer_norm(x, (self.width,), weight, bias, self.shape.eps)

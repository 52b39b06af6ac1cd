"""The feed-forward part of a layer, and its activations.

Sources: gates: Shazeer 2020 (arXiv 2002.05202); squared ReLU: So et al. 2021 (arXiv 2109.08668); the clamped
gate: openai/gpt-oss, `swiglu`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.models import shape as shapes
from piper.models.projections import Linear, by_inputs, by_outputs, compressed, expanded

QUICK_GELU_SLOPE = 1.702
"""Hendrycks, Gimpel 2016 (arXiv 1606.08415), section 2: GELU is about x * sigmoid(1.702 x)."""

ACTIVATIONS: dict[shapes.Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(QUICK_GELU_SLOPE * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def opened(shape: shapes.FeedForward, gate: Tensor) -> Tensor:
    """Return what the up projection is multiplied by, [..., width]."""
    if shape.clamp is not None:
        gate = gate.clamp(max=shape.clamp)
    if shape.gate_slope is not None:
        return gate * torch.sigmoid(shape.gate_slope * gate)
    return ACTIVATIONS[shape.activation](gate)


def lifted(shape: shapes.FeedForward, up: Tensor) -> Tensor:
    """Return the up projection as its gate takes it, [..., width]."""
    if shape.clamp is not None:
        up = up.clamp(-shape.clamp, shape.clamp)
    return up + shape.up_offset if shape.up_offset else up


class FeedForward(nn.Module):
    """The part that a `shape.FeedForward` describes; a fused gate lies before the up projection."""

    def __init__(self, shape: shapes.FeedForward, hidden: int) -> None:
        super().__init__()
        self.shape = shape
        if shape.gated and shape.fused_gate:
            self.gate_up_proj = Linear(hidden, 2 * shape.width, bias=shape.up_bias)
        else:
            if shape.gated:
                self.gate_proj = Linear(hidden, shape.width, bias=shape.up_bias)
            self.up_proj = Linear(hidden, shape.width, bias=shape.up_bias)
        self.down_proj = Linear(shape.width, hidden, bias=shape.down_bias)

    def prepare(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return what `forward` takes, made outside of the scope that tensor parallelism cuts."""
        return x, *compressed(x, *self._ups)

    def forward(self, prepared: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return what `finish` takes; `prepared` from [..., hidden]."""
        return by_inputs(self.down_proj, self._inner(*prepared))

    def finish(self, made: tuple[Tensor, ...]) -> Tensor:
        """Return [..., hidden], outside of that scope."""
        return expanded(self.down_proj, made)

    @property
    def _ups(self) -> tuple[nn.Linear, ...]:
        if not self.shape.gated:
            return (self.up_proj,)
        return (self.gate_up_proj,) if self.shape.fused_gate else (self.gate_proj, self.up_proj)

    def _inner(self, x: Tensor, *lows: Tensor) -> Tensor:
        left = [*lows]
        if not self.shape.gated:
            return ACTIVATIONS[self.shape.activation](by_outputs(self.up_proj, x, left))
        if self.shape.fused_gate:
            gate, up = by_outputs(self.gate_up_proj, x, left).chunk(2, dim=-1)
            return opened(self.shape, gate) * lifted(self.shape, up)
        return opened(self.shape, by_outputs(self.gate_proj, x, left)) * lifted(
            self.shape, by_outputs(self.up_proj, x, left)
        )

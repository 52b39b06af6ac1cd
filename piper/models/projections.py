"""Linear layers and tables whose parameters the model draws itself, and low-rank adapters beside them.

[Note: adapters under tensor parallelism]
A layer that is cut over its outputs reads what its adapter compressed outside of the scope, whole on every
rank. One that is cut over its inputs compresses its own part inside, which leaves the scope as a partial sum
and is expanded outside. So the cut of the frozen matrices stays as it is, and what is exchanged more has as
many features as the rank. `compressed`, `by_outputs`, `by_inputs` and `expanded` do so; without adapters
they are plain calls.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.models.shape import LowRankAdapters


class Linear(nn.Linear):
    """`nn.Linear` without its default initialisation, which the model's own one replaces."""

    def reset_parameters(self) -> None:
        """Leave the parameters as they are."""


class Embedding(nn.Embedding):
    """`nn.Embedding` without its default initialisation."""

    def reset_parameters(self) -> None:
        """Leave the parameters as they are."""


class AdaptedLinear(Linear):
    """A frozen linear layer with a trained product of low rank beside it (Hu et al. 2021, arXiv 2106.09685).

    `lora_A` [rank, in] and `lora_B` [out, rank] (which starts at 0) add alpha / rank * B A x.
    """

    def __init__(self, frozen: nn.Linear, adapters: LowRankAdapters) -> None:
        super().__init__(frozen.in_features, frozen.out_features, bias=frozen.bias is not None, device="meta")
        self.weight, self.bias = frozen.weight, frozen.bias
        self.factor = adapters.alpha / adapters.rank
        self.dropout = adapters.dropout
        device, dtype = frozen.weight.device, frozen.weight.dtype
        self.lora_A = nn.Parameter(torch.empty(adapters.rank, frozen.in_features, device=device, dtype=dtype))
        self.lora_B = nn.Parameter(
            torch.empty(frozen.out_features, adapters.rank, device=device, dtype=dtype)
        )

    def compress(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., rank]."""
        dropped = F.dropout(x, self.dropout, self.training) if self.dropout else x
        return F.linear(dropped, self.lora_A)

    def expand(self, low: Tensor) -> Tensor:
        """Map [..., rank] to [..., out]."""
        return F.linear(low * self.factor, self.lora_B)

    def forward(self, x: Tensor, low: Tensor | None = None) -> Tensor:
        """Map [..., in] to [..., out]; `low`: the compressed input, if it is known."""
        return super().forward(x) + self.expand(self.compress(x) if low is None else low)


def compressed(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """Return the compressed input of each layer that has an adapter."""
    return tuple(layer.compress(x) for layer in layers if isinstance(layer, AdaptedLinear))


def by_outputs(layer: nn.Module, x: Tensor, lows: list[Tensor]) -> Tensor:
    """Run a layer that is cut over its outputs; the first of `lows` is taken if it has an adapter."""
    made: Tensor = layer(x, lows.pop(0)) if isinstance(layer, AdaptedLinear) else layer(x)
    return made


def by_inputs(layer: nn.Linear, x: Tensor) -> tuple[Tensor, ...]:
    """Run a layer that is cut over its inputs; the compressed input comes second if it has an adapter."""
    if isinstance(layer, AdaptedLinear):
        return F.linear(x, layer.weight, layer.bias), layer.compress(x)
    return (layer(x),)


def expanded(layer: nn.Linear, made: tuple[Tensor, ...]) -> Tensor:
    """Return the output of a layer that `by_inputs` ran."""
    return made[0] + layer.expand(made[1]) if isinstance(layer, AdaptedLinear) else made[0]


def add_adapters(module: nn.Module, adapters: LowRankAdapters) -> None:
    """Freeze a module, and give each linear layer that is a target its adapter, in place."""
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    for parent in [*module.modules()]:
        for name, child in [*parent.named_children()]:
            if name in adapters.targets and isinstance(child, nn.Linear):
                setattr(parent, name, AdaptedLinear(child, adapters))

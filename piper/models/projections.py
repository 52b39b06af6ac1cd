"""Linear layers and tables whose parameters the model draws itself, and low-rank adapters beside them."""

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

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        dropped = F.dropout(x, self.dropout, self.training) if self.dropout else x
        return super().forward(x) + F.linear(F.linear(dropped, self.lora_A), self.lora_B) * self.factor


def add_adapters(module: nn.Module, adapters: LowRankAdapters) -> None:
    """Freeze a module, and give each linear layer that is a target its adapter, in place."""
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    for parent in [*module.modules()]:
        for name, child in [*parent.named_children()]:
            if name in adapters.targets and isinstance(child, nn.Linear):
                setattr(parent, name, AdaptedLinear(child, adapters))

"""Elementwise optimizers on flat shards: the same bits however the parameters are cut into shards.

The arithmetic is that of `torch.optim.AdamW(foreach=False)` and `torch.optim.SGD(foreach=False)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cost_models.errors import check_invariant
from piper.runtime.settings import OptimizerSettings


@dataclass(slots=True, kw_only=True)
class ShardState:
    """Optimizer state of one shard.

    Args:
        settings: which optimizer.
        master: fp32 parameters of the shard, changed in place.
        moments: AdamW: first and second moment.
    """

    settings: OptimizerSettings
    master: Tensor
    moments: tuple[Tensor, ...] = ()
    steps: int = field(default=0)

    @classmethod
    def new(cls, settings: OptimizerSettings, master: Tensor) -> ShardState:
        """Return the state before the first step."""
        count = 2 if settings.name == "adamw" else 0
        moments = tuple(torch.zeros_like(master) for _ in range(count))
        return cls(settings=settings, master=master, moments=moments)

    def step(self, gradient: Tensor) -> None:
        """Apply one step with an fp32 gradient of the shard's shape."""
        self.steps += 1
        match self.settings.name:
            case "adamw":
                self._adamw(gradient)
            case "sgd":
                self._sgd(gradient)
            case name:
                check_invariant(False, f"optimizer {name}")

    def _adamw(self, gradient: Tensor) -> None:
        facts = self.settings
        mean, square = self.moments
        self.master.mul_(1 - facts.learning_rate * facts.weight_decay)
        mean.lerp_(gradient, 1 - facts.beta1)
        square.mul_(facts.beta2).addcmul_(gradient, gradient, value=1 - facts.beta2)
        correction1 = 1 - facts.beta1**self.steps
        correction2 = (1 - facts.beta2**self.steps) ** 0.5
        scale = (square.sqrt() / correction2).add_(facts.epsilon)
        self.master.addcdiv_(mean, scale, value=-(facts.learning_rate / correction1))

    def _sgd(self, gradient: Tensor) -> None:
        facts = self.settings
        if facts.weight_decay:
            gradient = gradient.add(self.master, alpha=facts.weight_decay)
        self.master.add_(gradient, alpha=-facts.learning_rate)


def sum_of_squares(flat: Tensor, ranges: tuple[tuple[int, int], ...]) -> Tensor:
    """Return the fp64 sum of squares over element ranges of a flat fp32 gradient, in order."""
    total = torch.zeros((), dtype=torch.float64)
    for start, end in ranges:
        total += flat[start:end].double().square().sum()
    return total


def clip_scale(squares: float, limit: float) -> tuple[float, float]:
    """Return (norm, factor) of `torch.nn.utils.clip_grad_norm_` for a sum of squares."""
    norm = squares**0.5
    return norm, min(1.0, limit / (norm + 1e-6))

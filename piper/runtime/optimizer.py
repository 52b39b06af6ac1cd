"""Elementwise optimizers on flat shards: the same bits however the parameters are cut into shards.

The arithmetic is that of `torch.optim.AdamW(foreach=False)` and `torch.optim.SGD(foreach=False)`. It is made
in fp32; what is kept in another dtype (a plan may say so of moments and of parameters without masters) is
rounded after each step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cost_models.errors import check_invariant
from piper.runtime.ledger import Ledger
from piper.runtime.settings import OptimizerSettings
from simulator.plan import MemoryClass
from simulator.plan.states import MOMENTS


@dataclass(slots=True, kw_only=True)
class ShardState:
    """Optimizer state of one shard.

    Args:
        settings: which optimizer.
        master: fp32 parameters of the shard, changed in place.
        owns_master: whether the master is state of its own, not the parameters themselves.
        moments: AdamW: first and second moment; momentum: one.
        home: where the state waits between updates, if that is the host; empty while it visits the device.
    """

    settings: OptimizerSettings
    master: Tensor
    owns_master: bool
    moments: tuple[Tensor, ...] = ()
    home: tuple[Tensor, ...] = ()
    steps: int = field(default=0)

    @classmethod
    def new(
        cls,
        settings: OptimizerSettings,
        master: Tensor,
        *,
        owns_master: bool = False,
        moment_dtype: torch.dtype = torch.float32,
    ) -> ShardState:
        """Return the state before the first step."""
        count = MOMENTS[settings.name]
        moments = tuple(torch.zeros_like(master, dtype=moment_dtype) for _ in range(count))
        return cls(settings=settings, master=master, owns_master=owns_master, moments=moments)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the state's own tensors."""
        return (self.master, *self.moments) if self.owns_master else self.moments

    def leave(self, ledger: Ledger) -> None:
        """Go to the host."""
        for tensor in self.tensors:
            ledger.release(tensor.untyped_storage().data_ptr())
        self.live_on_host()

    def live_on_host(self) -> None:
        """Have the host as home; the ledger has not seen this state on the device."""
        self.home = tuple(tensor.clone() for tensor in self.tensors)
        self._take(tuple(torch.empty(0) for _ in self.home))

    def come_back(self, ledger: Ledger) -> None:
        """Come to the device."""
        self._take(tuple(tensor.clone() for tensor in self.home))
        self.home = ()
        for tensor in self.tensors:
            ledger.hold(tensor, MemoryClass.OPTIMIZER)

    def _take(self, tensors: tuple[Tensor, ...]) -> None:
        if self.owns_master:
            self.master, *moments = tensors
            self.moments = tuple(moments)
        else:
            self.moments = tensors

    def step(self, gradient: Tensor) -> None:
        """Apply one step with an fp32 gradient of the shard's shape."""
        self.steps += 1
        kept = (self.master, *self.moments)
        master, *moments = (tensor.float() for tensor in kept)  # the same tensors where they are fp32
        match self.settings.name:
            case "adamw":
                self._adamw(gradient, master, moments)
            case "sgd" | "momentum":
                self._sgd(gradient, master, moments)
            case name:
                check_invariant(False, f"optimizer {name}")
        for tensor, changed in zip(kept, (master, *moments), strict=True):
            if changed is not tensor:
                tensor.copy_(changed)

    def _adamw(self, gradient: Tensor, master: Tensor, moments: list[Tensor]) -> None:
        facts = self.settings
        mean, square = moments
        master.mul_(1 - facts.learning_rate * facts.weight_decay)
        mean.lerp_(gradient, 1 - facts.beta1)
        square.mul_(facts.beta2).addcmul_(gradient, gradient, value=1 - facts.beta2)
        correction1 = 1 - facts.beta1**self.steps
        correction2 = (1 - facts.beta2**self.steps) ** 0.5
        scale = (square.sqrt() / correction2).add_(facts.epsilon)
        master.addcdiv_(mean, scale, value=-(facts.learning_rate / correction1))

    def _sgd(self, gradient: Tensor, master: Tensor, moments: list[Tensor]) -> None:
        facts = self.settings
        if facts.weight_decay:
            gradient = gradient.add(master, alpha=facts.weight_decay)
        for moment in moments:
            gradient = moment.mul_(facts.momentum).add_(gradient)
        master.add_(gradient, alpha=-facts.learning_rate)


def sum_of_squares(flat: Tensor, ranges: tuple[tuple[int, int], ...]) -> Tensor:
    """Return the fp64 sum of squares over element ranges of a flat fp32 gradient, in order."""
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for start, end in ranges:
        total += flat[start:end].double().square().sum()
    return total


def clip_scale(squares: float, limit: float) -> tuple[float, float]:
    """Return (norm, factor) of `torch.nn.utils.clip_grad_norm_` for a sum of squares."""
    norm = squares**0.5
    return norm, min(1.0, limit / (norm + 1e-6))

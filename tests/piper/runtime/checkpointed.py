"""The toy with checkpoints of its own: forwards that run again in a way that Piper does not plan."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.piper.runtime.toy import Toy


class Again(nn.Module):
    """A layer that runs again in its backward, with whatever random numbers come then."""

    def __init__(self, layer: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=self.reentrant, preserve_rng_state=False)


class Checkpointed(Toy):
    """Each layer in a checkpoint of torch."""

    def __init__(self, *, reentrant: bool, **options: Any) -> None:
        super().__init__(in_place=False, **options)
        self.layers = nn.ModuleList(Again(layer, reentrant=reentrant) for layer in self.layers)


def checkpointed() -> Checkpointed:
    return Checkpointed(reentrant=False)


def dropping() -> Checkpointed:
    return Checkpointed(reentrant=False, dropout=0.1)


def reentrant() -> Checkpointed:
    return Checkpointed(reentrant=True)

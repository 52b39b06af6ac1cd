"""How many token numbers a module can take: the smallest table or class count that tokens or labels index."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from piper.capture.tensors import address_of

Indexing = tuple[Tensor, int]
"""(index tensor, how many values it may take)."""


class Vocabulary:
    """Notes the sizes of what is indexed.

    Args:
        inputs: tokens and labels; a size counts when they, or views of them, index it. Only where none
            does, what integers made from them index counts.
    """

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        self._inputs = frozenset(address_of(tensor) for tensor in inputs)
        self._direct: list[int] = []
        self._derived: list[int] = []

    def note(self, op: str, args: Sequence[Any]) -> None:
        """Take an operator of the forward pass."""
        for index, size in _indexings(op, args):
            known = address_of(index) in self._inputs
            (self._direct if known else self._derived).append(size)

    @property
    def size(self) -> int:
        """Return the smallest size, or 0 when nothing was indexed."""
        return min(self._direct or self._derived, default=0)


def _indexings(op: str, args: Sequence[Any]) -> list[Indexing]:
    match op:
        case "embedding":
            return [(args[1], args[0].shape[0])]
        case "nll_loss_forward" | "cross_entropy":
            return [(args[1], args[0].shape[-1])]
        case "index_select" | "gather":
            return [(args[2], args[0].shape[args[1]])]
        case "index":
            pairs = zip(args[1], args[0].shape, strict=False)
            return [(i, size) for i, size in pairs if i is not None and not i.dtype.is_floating_point]
        case _:
            return []

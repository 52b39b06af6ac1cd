"""Dropout whose mask belongs to (seed, step, global sample, operation), whoever computes it and when.

[Note: keyed dropout]
Every training-mode dropout of the model, counted in forward order, draws the mask of a sample from a
generator of its own. So a recompute repeats its forward, microbatches may come in any order and any cut,
and the whole batch in one process sees the same masks (DESIGN 6).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from piper.errors import ModelError
from piper.runtime.seeds import seed_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutKeys:
    """What the masks of one microbatch depend on.

    Args:
        seed, step: of the run.
        samples: global numbers of the samples, in the order of the leading dimension.
    """

    seed: int
    step: int
    samples: Sequence[int]


def keyed_dropout(
    x: Tensor,
    probability: float,
    *,
    keys: DropoutKeys,
    operation: int,
    whole: tuple[int, ...] | None = None,
    cut: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Drop elements of `x`, [samples, ...] or [samples * n, ...]; scale the rest by 1 / (1 - probability).

    Where a rank has a part of every sample only, `whole` is the shape of a sample and `cut` returns its part.
    """
    count = len(keys.samples)
    if x.dim() == 0 or x.shape[0] % count:
        raise ModelError(
            where="dropout",
            field="shape",
            value=tuple(x.shape),
            rule=f"must begin with the {count} samples of the microbatch",
            fix="keep the batch dimension first where dropout is applied",
        )
    shape = whole or (x.shape[0] // count, *x.shape[1:])
    draws = [_draw(shape, keys, (sample, operation)) for sample in keys.samples]
    if cut is not None:
        draws = [cut(draw) for draw in draws]
    return x * ((torch.cat(draws) >= probability).to(x.dtype) / (1.0 - probability)).to(x.device)


def _draw(shape: tuple[int, ...], keys: DropoutKeys, place: tuple[int, int]) -> Tensor:
    generator = torch.Generator().manual_seed(seed_of("dropout", keys.seed, keys.step, *place))
    return torch.rand(shape, generator=generator)


def dropout_call(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, float] | None:
    """Return (input, probability) of a call that drops anything, else None."""
    if func is not torch.nn.functional.dropout:
        return None
    given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    probability = given.get("p", 0.5)
    return (given["input"], probability) if given.get("training", True) and probability > 0 else None


class KeyedDropout(TorchFunctionMode):
    """Give an ordinary module the same masks: every dropout call inside is replaced, in forward order."""

    def __init__(self, keys: DropoutKeys) -> None:
        super().__init__()
        self.keys = keys
        self.operation = 0

    def __torch_function__(  # noqa: PLR0917  torch fixes the signature
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace `F.dropout` in training mode; leave everything else alone."""
        call = kwargs or {}
        dropped = dropout_call(func, args, call)
        if dropped is None:
            return func(*args, **call)
        self.operation += 1
        x, probability = dropped
        return keyed_dropout(x, probability, keys=self.keys, operation=self.operation - 1)

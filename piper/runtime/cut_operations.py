"""What a rank calls in place of torch functions that would see cut parameters, features or tokens.

The first argument is `Here`, the others are those of the function that is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cost_models.errors import check_invariant
from piper.runtime.dropout import keyed_dropout
from piper.runtime.here import CutRows, Here
from piper.runtime.ring import RingFacts, ring_attention

_ELSEWHERE = -1
"""Number of a token whose row another rank has."""


class Placed:
    """A function that takes `Here` first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutDropout(Placed):
    """`F.dropout` with masks by sample [Note: keyed dropout], of which a rank applies its part.

    Args:
        operation: number of the dropout in the model.
        whole: shape of one sample's mask; None: as the input.
        dims: what of it is cut: (dimension, "tokens" or "features").
    """

    operation: int
    whole: tuple[int, ...] | None = None
    dims: tuple[tuple[int, str], ...] = ()

    def __call__(self, here: Here, input: Tensor, p: float = 0.5, *_: Any, **__: Any) -> Tensor:  # noqa: A002
        """Take the arguments of `F.dropout` (training and inplace have been looked at)."""
        return keyed_dropout(
            input,
            p,
            keys=here.keys,
            operation=self.operation,
            whole=self.whole,
            cut=lambda mask: self._part(mask, here),
        )

    def _part(self, mask: Tensor, here: Here) -> Tensor:
        for dim, what in self.dims:
            if what == "tokens":
                mask = mask.index_select(dim, _positions(here).to(mask.device))
            else:
                size = mask.shape[dim] // here.tensor[1]
                mask = mask.narrow(dim, here.tensor[0] * size, size)
        return mask


@dataclass(frozen=True, slots=True)
class CutEmbedding(Placed):
    """`F.embedding` over a table of which this rank has its rows; zeros for tokens of other ranks."""

    def __call__(self, here: Here, tokens: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return this rank's part of a sum over ranks."""
        mine = tokens - here.tensor[0] * weight.shape[0]
        mine = mine.masked_fill_((mine < 0) | (mine >= weight.shape[0]), _ELSEWHERE)
        rows: Tensor = _CutEmbedding.apply(mine, weight)  # type: ignore[no-untyped-call]
        return rows


class _CutEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(mine)
        ctx.rows = weight.shape[0]
        found = F.embedding(mine.clamp(min=0), weight)
        return found.masked_fill_((mine == _ELSEWHERE).unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        (mine,) = ctx.saved_tensors
        to_table = torch.ops.aten.embedding_dense_backward
        return None, to_table(gradients[0], mine, ctx.rows, _ELSEWHERE, False)


@dataclass(frozen=True, slots=True)
class CutLoss(Placed):
    """`F.cross_entropy(reduction="sum")` over logits of which this rank has some columns.

    What it returns is filled in place once ranks have agreed on the rows.

    Args:
        ignored: label of rows that do not count.
    """

    ignored: int

    def __call__(self, here: Here, logits: Tensor, labels: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the sum of the token losses, empty until then."""
        loss: Tensor = _CutLoss.apply(logits, labels, here, self.ignored)  # type: ignore[no-untyped-call]
        return loss


class _CutLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, here: Here, ignored: int) -> Tensor:  # noqa: PLR0917
        place, _ = here.tensor
        mine = labels - place * logits.shape[1]
        counted = labels != ignored
        here_too = counted & (mine >= 0) & (mine < logits.shape[1])
        column = mine.masked_fill(~here_too, 0).unsqueeze(1)
        largest = logits.amax(dim=1)
        total = torch.exp(logits - largest.unsqueeze(1)).sum(dim=1)
        wanted = logits.gather(1, column).squeeze(1) * here_too
        loss = logits.new_zeros(())
        known = here.rows.get(here.segment)
        rows = CutRows(torch.stack([largest, total, wanted]), counted, loss.detach())
        if known is not None:  # made again: ranks agreed in the forward
            rows.largest, rows.total = known.largest, known.total
        here.rows[here.segment] = rows
        ctx.rows = rows
        ctx.save_for_backward(logits, labels)
        ctx.place, ctx.ignored = place, ignored
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels = ctx.saved_tensors
        rows: CutRows = ctx.rows
        check_invariant(rows.largest is not None and rows.total is not None, "ranks have not agreed")
        if rows.largest is None or rows.total is None:
            return None, None, None, None
        softmax = torch.exp(logits - rows.largest.unsqueeze(1)) / rows.total.unsqueeze(1)
        mine = labels - ctx.place * logits.shape[1]
        here_too = rows.counted & (mine >= 0) & (mine < logits.shape[1])
        column = mine.masked_fill(~here_too, 0).unsqueeze(1)
        softmax.scatter_add_(1, column, -here_too.to(softmax.dtype).unsqueeze(1))
        return softmax * rows.counted.unsqueeze(1) * gradients[0], None, None, None


@dataclass(frozen=True, slots=True)
class CutLinear(Placed):
    """`F.linear` with a bias over inputs that are cut: one rank adds the bias, as the results are summed."""

    def __call__(  # noqa: PLR0917  as torch has them
        self,
        here: Here,
        input: Tensor,  # noqa: A002
        weight: Tensor,
        bias: Tensor,
    ) -> Tensor:
        """Return this rank's part of a sum over ranks."""
        return F.linear(input, weight, bias * float(here.tensor[0] == 0))


@dataclass(frozen=True, slots=True)
class CutTable(Placed):
    """A table by position, sliced to the length of the sequence: this rank takes the rows of its tokens."""

    def __call__(self, here: Here, table: Tensor, index: Any) -> Tensor:
        """Take the arguments of `Tensor.__getitem__`."""
        rest = index[1:] if isinstance(index, tuple) else ()
        return table.index_select(0, _positions(here).to(table.device))[(slice(None), *rest)]


@dataclass(frozen=True, slots=True)
class CutRange(Placed):
    """`torch.arange` over the tokens of a sequence: their positions."""

    def __call__(self, here: Here, *_: Any, **options: Any) -> Tensor:
        """Return the positions of this rank's tokens."""
        found = _positions(here).to(options.get("dtype") or torch.int64)
        return found.to(options.get("device") or found.device)


@dataclass(frozen=True, slots=True)
class RingAttention(Placed):
    """`F.scaled_dot_product_attention` over a sequence that is cut over ranks [Note: ring attention].

    Args:
        causal: a token sees those before it.
        scale: of scores; None: 1 / sqrt(head_dim).
    """

    causal: bool
    scale: float | None

    def __call__(self, here: Here, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:  # noqa: PLR0917
        """Return what this rank's queries see of all tokens."""
        check_invariant(here.rings is not None, "a ring without its ranks")
        scale = self.scale if self.scale is not None else query.shape[-1] ** -0.5
        facts = RingFacts(self.causal, scale)
        if here.rings is None:
            return torch.empty_like(query)
        return ring_attention(query, key, value, rings=here.rings, facts=facts)


@dataclass(frozen=True, slots=True)
class CutRowNumbers(Placed):
    """`torch.arange` over the rows that the experts of this rank take, as many as the router sent."""

    def __call__(self, here: Here, count: int, **options: Any) -> Tensor:
        """Return the numbers of the rows."""
        return torch.arange(count if here.expert_rows is None else here.expert_rows, **options)


def _positions(here: Here) -> Tensor:
    tokens: Sequence[int] = here.tokens or ()
    check_invariant(here.tokens is not None, "a segment that does not know its tokens")
    return torch.tensor(tokens, dtype=torch.int64)

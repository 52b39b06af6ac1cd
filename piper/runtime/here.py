"""`Here`: what the code of a segment knows of the rank and the microbatch that it runs for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from piper.runtime.dropout import DropoutKeys
from piper.runtime.ring import Ring


@dataclass(slots=True)
class CutRows:
    """A softmax over features that are cut over ranks, row by row (Shoeybi et al. 2019, section 3).

    Args:
        local: [3, rows]: largest logit, sum of exp(logit - largest), logit of the label (0: elsewhere).
        largest, total: [rows], over all ranks; None until they have agreed.
        counted: [rows], 0 where a row has no label.
        loss: the sum of the token losses, filled once ranks have agreed.
    """

    local: Tensor
    counted: Tensor
    loss: Tensor
    largest: Tensor | None = None
    total: Tensor | None = None

    def agree(self, every: Tensor) -> None:
        """Take what all ranks have, [ranks, 3, rows], and set the loss."""
        largest, sums, wanted = every[:, 0], every[:, 1], every[:, 2]
        self.largest = largest.amax(dim=0)
        self.total = (sums * torch.exp(largest - self.largest)).sum(dim=0)
        rows = self.largest + self.total.log() - wanted.sum(dim=0)
        self.loss.copy_((rows * self.counted).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """One rank, one microbatch, one segment.

    Args:
        keys: of dropout masks.
        tensor: (place, ranks) on the axis tp.
        tokens: positions in the sequence of the tokens of a segment, [tokens] int64; None: all of them.
        rows: microbatch's softmaxes over cut features, by segment; filled by the code.
        segment: which.
        expert_rows: of the segment, as many as the router sent; None: nothing was routed.
        rings: of the segment's attention, forward (False) and backward (True); None: nothing goes round.
    """

    keys: DropoutKeys
    tensor: tuple[int, int] = (0, 1)
    tokens: Sequence[int] | None = None
    rows: dict[int, CutRows] = field(default_factory=dict)
    segment: int = 0
    expert_rows: int | None = None
    rings: Callable[[bool], Ring] | None = None

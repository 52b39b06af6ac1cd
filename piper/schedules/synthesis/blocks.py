"""Building blocks: when each stage runs F and BI of one microbatch, and how blocks are made and moved.

[Note: building block as keys]
A block says when each stage runs F and BI of microbatch 0; microbatch m does the same m periods later. The
period is the work of the busiest rank, and passes need not fit between each other: the times are keys, of
which list scheduling makes an order. So every block gives an order, however unequal the passes are.
Source of blocks that repeat: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv
2405.15362), section 3.
[Note: how blocks are moved]
Between neighbours on the way of a microbatch (F down, BI up) there is slack. A move makes one slack, one at
the expense of another, or those of a whole direction longer or shorter by a share of a period, or changes how
a rank waits for what comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from piper.schedules.synthesis.pipeline import Pipeline

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_UNLIMITED = 2**40
_STRETCHES = (0.0, 0.5, 1.0, 2.0, 3.0)
_HOLDS = (0.0, 0.5, 1.0)
_GAPS = (0.0, 0.5, 1.0)
_LEADS = (None, 0, 1)
_SHARES = (0.5, 0.25, 0.125, 0.05, 0.025)
_MOVES = {"hold": 3, "gap": 3, "lead": 2, "one": 6, "exchange": 4, "slope": 2}
"""How often each move is tried, in twentieths."""
_POLICIES: dict[str, tuple[Any, ...]] = {
    "hold": (*_HOLDS, 0.25, 0.75, 1.5),
    "gap": (*_GAPS, 0.25, 0.75),
    "lead": (*_LEADS, 2),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """A building block; see [Note: building block as keys].

    Args:
        slack: in periods, float64 [2S - 1]: before F of stages 1 to S - 1, before BI of S - 1 down to 0.
        hold, gap: policies of [Note: list scheduling by keys], in shares of a pass.
        lead: most microbatches between F and BI of a stage beyond those of the block, or None.
        made: what it was made from.
    """

    slack: Floats
    hold: float = 0.0
    gap: float = 0.0
    lead: int | None = None
    made: str

    @staticmethod
    def of_starts(pipeline: Pipeline, starts: Ints, *, made: str) -> Block:
        """Return the block of the microbatch in the middle of an order.

        Args:
            pipeline: whose order.
            starts: of its passes, int64 [S, 3, M].
            made: what the order is.
        """
        forward, inputs, _ = pipeline.costs
        down, up, _ = starts[:, :, pipeline.num_microbatches // 2].T
        hop = np.array(pipeline.hop_ns, dtype=np.int64)
        slack = [
            *(down[1:] - down[:-1] - forward[:-1] - hop),
            up[-1] - down[-1] - forward[-1],
            *(up[:-1] - up[1:] - inputs[1:] - hop)[::-1],
        ]
        return Block(slack=np.array(slack, dtype=np.float64) / pipeline.period_ns, made=made)

    def keys(self, pipeline: Pipeline) -> tuple[Floats, Ints]:
        """Return the keys of F and BI, float64 [2, S, M], and most microbatches in flight, int64 [S]."""
        forward, inputs, _ = pipeline.costs.astype(np.float64)
        hop = np.array(pipeline.hop_ns, dtype=np.float64)
        wait = self.slack * pipeline.period_ns
        count = pipeline.num_stages
        down = np.concatenate([[0.0], np.cumsum(forward[:-1] + hop + wait[: count - 1])])
        turn = down[-1] + forward[-1] + wait[count - 1]
        up = np.concatenate([[turn], turn + np.cumsum((inputs[1:] + hop)[::-1] + wait[count:])])[::-1]
        block = np.stack([down, up])
        keys = block[:, :, None] + pipeline.period_ns * np.arange(pipeline.num_microbatches)
        if self.lead is None:
            return keys, np.full(count, _UNLIMITED, dtype=np.int64)
        lives = np.ceil((up + inputs - down) / pipeline.period_ns).astype(np.int64)
        return keys, np.maximum(lives + self.lead, 1)

    def moved(self, random: Random) -> Block:
        """Return a neighbour; see [Note: how blocks are moved]."""
        (move,) = random.choices(tuple(_MOVES), weights=tuple(_MOVES.values()))
        if move in _POLICIES:
            return replace(self, **{move: random.choice(_POLICIES[move])})
        slack = self.slack.copy()
        share = random.choice(_SHARES) * random.choice((-1, 1))
        count = len(slack)
        slopes = (slice(0, count // 2), slice(count // 2 + 1, count))
        if move == "slope":
            slack[random.choice(slopes)] *= 1 + share
        else:
            slack[random.randrange(count)] += share
        if move == "exchange":
            slack[random.randrange(count)] -= share
        return replace(self, slack=slack)


def first_blocks(pipeline: Pipeline, known: Sequence[Block]) -> Iterator[Block]:
    """Yield the blocks that a search starts from: known ones and steady slopes, under every policy."""
    forward, inputs, _ = pipeline.costs / pipeline.period_ns
    slopes = [
        Block(
            slack=np.concatenate([forward[:-1] * stretch, [0.0], inputs[:0:-1] * stretch]),
            made=f"slope {1 + stretch:g}",
        )
        for stretch in _STRETCHES
    ]
    for hold, gap, lead in product(_HOLDS, _GAPS, _LEADS):
        for block in (*known, *slopes):
            yield replace(block, hold=hold, gap=gap, lead=lead)

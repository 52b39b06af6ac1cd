"""Orders of passes in numbers: from rows and blocks, and how long they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from piper.schedules.rows import parse_rows
from piper.schedules.synthesis.kernel import listed, replayed
from piper.schedules.synthesis.pipeline import Pipeline
from simulator.plan.task import TaskKind

if TYPE_CHECKING:
    from piper.schedules.synthesis.blocks import Block

Ints = npt.NDArray[np.int64]

NONE = -1
_PARTS = {TaskKind.F: (0,), TaskKind.BI: (1,), TaskKind.BW: (2,), TaskKind.B: (1, 2)}
_LETTERS = ("F", "BI", "BW")

Score = tuple[int, int]
"""Makespan, longest span of a rank."""
WORST: Score = (2**62, 2**62)


@dataclass(kw_only=True)
class Timer:
    """Times orders of one pipeline, and counts the passes that it has timed."""

    pipeline: Pipeline
    timed: int = 0
    _stages: Ints = field(init=False)
    _arrays: tuple[Ints, ...] = field(init=False)
    _order: Ints = field(init=False)

    def __post_init__(self) -> None:
        held = self.pipeline.stages
        self._stages = np.full((len(held), max(map(len, held))), NONE, dtype=np.int64)
        for rank, stages in enumerate(held):
            self._stages[rank, : len(stages)] = stages
        hop = np.array([*self.pipeline.hop_ns, 0], dtype=np.int64)
        sizes = (self.pipeline.held_bytes, self.pipeline.left_bytes)
        self._arrays = (self.pipeline.costs, hop, *(np.array(size, dtype=np.int64) for size in sizes))
        length = 3 * self._stages.shape[1] * self.pipeline.num_microbatches
        self._order = np.full((len(held), length), NONE, dtype=np.int64)

    def list_block(self, block: Block) -> Score:
        """Return the score of a block's order, `WORST` if it does not fit; `order` is then that order."""
        self.timed += self.pipeline.num_passes
        keys, limit = block.keys(self.pipeline)
        cap = np.array(self.pipeline.cap_bytes, dtype=np.int64)
        policy = np.array([block.hold, block.gap])
        self._order[:] = NONE
        end, span, ran = listed(self._stages, *self._arrays, cap, keys, limit, policy, self._order)
        return (int(end), int(span)) if ran == self.pipeline.num_passes else WORST

    @property
    def order(self) -> Ints:
        """Return the passes by number of the last block, int64 [ranks, most passes]; NONE behind the last."""
        return self._order.copy()

    def replay(self, order: Ints) -> tuple[Score, Ints, Ints]:
        """Return an order's score, when each pass starts, int64 [S, 3, M], and the peak bytes of ranks."""
        pipeline = self.pipeline
        self.timed += pipeline.num_passes
        starts = np.empty(pipeline.num_passes, dtype=np.int64)
        peaks = np.empty(len(pipeline.stages), dtype=np.int64)
        home = np.array(pipeline.rank_of_stage, dtype=np.int64)
        end, span, ran = replayed(home, *self._arrays, order, starts, peaks)
        if ran != pipeline.num_passes:
            raise ValueError("the order has passes that wait for each other, or lacks some")
        return (int(end), int(span)), starts.reshape(pipeline.num_stages, 3, -1), peaks


def order_of_rows(pipeline: Pipeline, rows: Sequence[Sequence[object]]) -> Ints:
    """Return rows as numbers, int64 [ranks, most passes]; a fused B is BI and then BW, slots come apart."""
    numbers = [
        [
            (3 * task.stage + part) * pipeline.num_microbatches + task.microbatch
            for slot in row
            for task in slot
            for part in _PARTS[task.kind]
        ]
        for row in parse_rows(rows, where="library")
    ]
    order = np.full((len(rows), max(map(len, numbers))), NONE, dtype=np.int64)
    for rank, row in enumerate(numbers):
        order[rank, : len(row)] = row
    return order


def rows_of_order(pipeline: Pipeline, order: Ints) -> tuple[tuple[str, ...], ...]:
    """Return an order as codes; BI is B, and BW nothing, where backwards are fused."""
    letters = ("F", "B", "") if pipeline.fused else _LETTERS
    cell, microbatch = np.divmod(order, pipeline.num_microbatches)
    stage, kind = np.divmod(cell, 3)
    return tuple(
        tuple(
            f"{s}{letters[k]}{m}"
            for s, k, m in zip(
                stage[rank, :n].tolist(), kind[rank].tolist(), microbatch[rank].tolist(), strict=False
            )
            if letters[k]
        )
        for rank, n in enumerate((order != NONE).sum(axis=1).tolist())
    )

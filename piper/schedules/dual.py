"""The order that DualPipe and DualPipeV share: F of one stage overlaps with B of the other, and the reverse.

Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 3.2.1 and figure 5, with
the eight phases of the published `dualpipe.py`. A row has two stages, "near" (its microbatches arrive first)
and "far". There are d rows from the first to the one at the turn; row r, from 0, runs n microbatches of each
stage:

    2 (d - r - 1) times  F near
    r + 1                F near, F far
    d - r - 1            BI far, BW, F far
    n - 2d + r + 1       {F near, B far}, {F far, B near}
    d - r - 1            B far, {F far, B near}
    r + 1                B far, B near; BI instead of B from the half on
    d - r - 1            BW, BI near
    r + 1                BW

{...} is one slot. The first {F near, B far} of row d - 1 is two slots: its F is what the other side waits
for. BW is that of the oldest BI without one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

Slot = str | list[str]


def dual_row(
    near: int,
    far: int,
    *,
    row: int,
    num_rows: int,
    microbatches: Mapping[int, Sequence[int]],
) -> list[Slot]:
    """Return the slots of one row, as codes.

    Args:
        near, far: the row's two stages.
        row, num_rows: r and d above.
        microbatches: of each of the two stages, in order; equally many, 2d or more.
    """
    return _Row(near, far, microbatches).slots(row, num_rows)


class _Row:
    """A row that grows; each stage counts its own forwards and backwards."""

    def __init__(self, near: int, far: int, microbatches: Mapping[int, Sequence[int]]) -> None:
        self.near, self.far = near, far
        self.num_microbatches = len(microbatches[near])
        self.forwards = {stage: iter(microbatches[stage]) for stage in (near, far)}
        self.backwards = {stage: iter(microbatches[stage]) for stage in (near, far)}
        self.found: list[Slot] = []
        self.waiting: deque[str] = deque()

    def slots(self, row: int, num_rows: int) -> list[Slot]:
        near, far, others = self.near, self.far, num_rows - row - 1
        self.found += [self._forward(near) for _ in range(2 * others)]
        for _ in range(row + 1):
            self.found += [self._forward(near), self._forward(far)]
        for _ in range(others):
            self.found.append(self._input(far))
            self._weight()
            self.found.append(self._forward(far))
        for number in range(self.num_microbatches - 2 * num_rows + row + 1):
            pair = [self._forward(near), self._backward(far)]
            self.found += pair if number == 0 and others == 0 else [pair]
            self.found.append([self._forward(far), self._backward(near)])
        for _ in range(others):
            self.found.append(self._backward(far))
            self.found.append([self._forward(far), self._backward(near)])
        self._last_backwards(row)
        for _ in range(others):
            self._weight()
            self.found.append(self._input(near))
        while self.waiting:
            self._weight()
        return self.found

    def _last_backwards(self, row: int) -> None:
        """Add 2 (r + 1) backwards in turn; those from number r + 1 on leave their BW for later."""
        for number in range(2 * (row + 1)):
            stage = self.near if number % 2 else self.far
            self.found.append(self._backward(stage) if number <= row else self._input(stage))

    def _forward(self, stage: int) -> str:
        return f"{stage}F{next(self.forwards[stage])}"

    def _backward(self, stage: int) -> str:
        return f"{stage}B{next(self.backwards[stage])}"

    def _input(self, stage: int) -> str:
        microbatch = next(self.backwards[stage])
        self.waiting.append(f"{stage}BW{microbatch}")
        return f"{stage}BI{microbatch}"

    def _weight(self) -> None:
        self.found.append(self.waiting.popleft())

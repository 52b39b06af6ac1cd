"""Rows in a V from a building block that repeats: what V-Half and V-Min share.

[Note: building block]
A block says in which slot each rank runs F and BI of a microbatch's two stages, when every pass takes one
slot; the next microbatch does the same 6 slots later (2 stages, 3 passes). The slots of a rank differ modulo
6, so blocks never meet. How long a block keeps a stage's activations, over 6, is how many a rank holds.
Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362), section 3.
[Note: squeezing]
Ranks keep the blocks' order of F and BI, and run each as soon as its input is there. A BW runs when the rank
would wait otherwise: for an input, or because its next F would be one more than it may hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cost_models.errors import check_invariant

_SLOTS_OF_A_BLOCK = 6

Block = Mapping[tuple[int, str], int]
"""By stage and kind (F, BI), the slot of one rank's pass of microbatch 0."""
_Pass = tuple[int, str, int]
"""Stage, kind, microbatch."""


def v_rows(blocks: Sequence[Block], *, num_microbatches: int, most_held: int) -> list[list[str]]:
    """Return the rows of blocks that repeat, squeezed; see [Note: squeezing].

    Args:
        blocks: of each rank; see [Note: building block].
        num_microbatches: microbatches per step.
        most_held: passes F without their BW that a rank may hold; no fewer than its block holds.
    """
    ranks = [_Rank(waiting=_in_order(block, num_microbatches)) for block in blocks]
    last_stage = 2 * len(blocks) - 1
    done: set[_Pass] = set()
    while any(rank.waiting or rank.weights for rank in ranks):
        ran = [rank.step(done, last_stage=last_stage, most_held=most_held) for rank in ranks]
        check_invariant(any(ran), "blocks that repeat are stuck")
        done.update(found for found in ran if found)
    return [rank.row for rank in ranks]


def _in_order(block: Block, num_microbatches: int) -> deque[_Pass]:
    timed = (
        (slot + _SLOTS_OF_A_BLOCK * microbatch, stage, kind, microbatch)
        for (stage, kind), slot in block.items()
        for microbatch in range(num_microbatches)
    )
    return deque((stage, kind, microbatch) for _, stage, kind, microbatch in sorted(timed))


@dataclass(slots=True, kw_only=True)
class _Rank:
    """A rank on its way: F and BI to run, BW that wait, passes that it holds, and its row so far."""

    waiting: deque[_Pass]
    weights: deque[_Pass] = field(default_factory=deque)
    held: int = 0
    row: list[str] = field(default_factory=list)

    def step(self, done: set[_Pass], *, last_stage: int, most_held: int) -> _Pass | None:
        """Run one pass for a slot, and return it; None if there is none to run."""
        if self.waiting and self._can_run(self.waiting[0], done, last_stage, most_held=most_held):
            found = self.waiting.popleft()
        elif self.weights:
            found = self.weights.popleft()
        else:
            return None
        stage, kind, microbatch = found
        self.held += {"F": 1, "BW": -1}.get(kind, 0)
        if kind == "BI":
            self.weights.append((stage, "BW", microbatch))
        self.row.append(f"{stage}{kind}{microbatch}")
        return found

    def _can_run(self, task: _Pass, done: set[_Pass], last_stage: int, *, most_held: int) -> bool:
        stage, kind, microbatch = task
        if kind == "F":
            return self.held < most_held and (stage == 0 or (stage - 1, "F", microbatch) in done)
        before = (stage + 1, "BI", microbatch) if stage < last_stage else (stage, "F", microbatch)
        return before in done

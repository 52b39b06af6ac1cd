"""Orders under a memory cap: known schedules, list scheduling from building blocks, and moving the blocks.

Moves that make nothing worse are kept. The random numbers start from one seed, and the search ends by how
many passes it has timed: the same pipeline gives the same order on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import numpy.typing as npt

from piper.schedules.synthesis.blocks import Block, first_blocks
from piper.schedules.synthesis.library import Known, known_schedules
from piper.schedules.synthesis.pipeline import Pipeline, Synthesis
from piper.schedules.synthesis.timing import WORST, Score, Timer, order_of_rows, rows_of_order

Ints = npt.NDArray[np.int64]

PASSES_TIMED = 10_000_000
"""Passes of all orders that one search times: about a second of one core."""
_TRIES = 4000
"""Orders that one search times at most: small pipelines are searched through long before."""
_DEPTHS = 4
"""Microbatches per rank of the shorter step on which blocks are moved."""
_STARTS = 4
"""Blocks that local search starts from."""
_FINALISTS = 12
"""Blocks of the shorter step whose orders are made for the whole step."""


def synthesize(
    pipeline: Pipeline, *, library: Sequence[Known] | None = None, passes_timed: int = PASSES_TIMED
) -> Synthesis:
    """Return the order with the shortest makespan that was found, then the shortest span of a rank.

    Args:
        pipeline: whose passes to order.
        library: known orders of these stages (default: `known_schedules`): those that fit the memory
            compete, and all give blocks to start from.
        passes_timed: when to stop.
    """
    known = known_schedules(pipeline) if library is None else library
    search = _Search(pipeline=pipeline, budget=passes_timed)
    search.run(known, enough=pipeline.bound_ns)
    return search.results()[0]


def synthesize_several(pipeline: Pipeline, *, passes_timed: int = PASSES_TIMED) -> list[Synthesis]:
    """Return the best order of each origin, best first: for those who know more of the pipeline.

    The origins are the known schedules that fit, and the blocks that local search started from.
    """
    search = _Search(pipeline=pipeline, budget=passes_timed)
    search.run(known_schedules(pipeline), enough=0)
    return search.results()


@dataclass(kw_only=True)
class _Search:
    """The best order so far.

    Args:
        pipeline: whose passes are ordered.
        budget: passes to time.
    """

    pipeline: Pipeline
    budget: int
    tried: int = 0
    _found: dict[str, tuple[Score, Ints]] = field(default_factory=dict)
    _blocks: list[Block] = field(default_factory=list)
    _timer: Timer = field(init=False)

    def __post_init__(self) -> None:
        self._timer = Timer(pipeline=self.pipeline)

    def run(self, library: Iterable[Known], *, enough: int) -> None:
        """Try the library, and then blocks unless a makespan is `enough`."""
        for known in library:
            self.try_known(known)
        if min(score[0] for score, _ in self._found.values()) > enough:
            self.try_blocks(enough)

    def try_known(self, known: Known) -> None:
        """Time a known schedule as it is, and keep its block."""
        order = order_of_rows(self.pipeline, known.rows)
        score, starts, peaks = self._timer.replay(order)
        self._blocks.append(Block.of_starts(self.pipeline, starts, made=known.name))
        self.tried += 1
        if np.all(peaks <= np.array(self.pipeline.cap_bytes)):
            self._keep(score, order, known.name)

    def try_blocks(self, enough: int) -> None:
        """List first blocks and those near the best of them on a shorter step, then the best on the whole."""
        short = min(self.pipeline.num_microbatches, _DEPTHS * len(self.pipeline.stages))
        timer = Timer(pipeline=replace(self.pipeline, num_microbatches=short))
        spare = _FINALISTS * self.pipeline.num_passes
        found = [(timer.list_block(b), b) for b in first_blocks(self.pipeline, self._blocks)]
        found.sort(key=lambda pair: pair[0])
        self.tried += len(found)
        random = Random(0)
        for number, start in enumerate(found[:_STARTS]):
            until = (self.budget - spare) * (number + 1) // _STARTS
            found += self._climbed(timer, start, random=random, until=until)
        found.sort(key=lambda pair: pair[0])
        for score, block in found[:_FINALISTS]:
            if score == WORST or min(best[0] for best, _ in self._found.values()) <= enough:
                break
            self._keep(self._timer.list_block(block), self._timer.order, f"block of {block.made}")
            self.tried += 1

    def _climbed(
        self, timer: Timer, start: tuple[Score, Block], *, random: Random, until: int
    ) -> list[tuple[Score, Block]]:
        """Return the better and better blocks that random moves lead to."""
        score, block = start
        found = []
        for _ in range(_TRIES // _STARTS):
            if timer.timed >= until or score[0] <= timer.pipeline.bound_ns:
                break
            moved = block.moved(random)
            other = timer.list_block(moved)
            self.tried += 1
            if other <= score:
                if other < score:
                    found.append((other, moved))
                score, block = other, moved
        return found

    def _keep(self, score: Score, order: Ints, method: str) -> None:
        if score != WORST and score < self._found.get(method, (WORST,))[0]:
            self._found[method] = (score, order)

    def results(self) -> list[Synthesis]:
        """Return the best order of each origin, best first; any legal cap has one, by one by one."""
        ranked = sorted((score, method) for method, (score, _) in self._found.items())
        return [self._result(method) for _, method in ranked]

    def _result(self, method: str) -> Synthesis:
        score, order = self._found[method]
        _, _, peaks = self._timer.replay(order)
        return Synthesis(
            rows=rows_of_order(self.pipeline, order),
            makespan_ns=score[0],
            longest_span_ns=score[1],
            peak_bytes=tuple(peaks.tolist()),
            bound_ns=self.pipeline.bound_ns,
            method=method,
            tried=self.tried,
        )

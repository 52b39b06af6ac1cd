"""Synthesized: found for the costs of the passes under a memory cap; one or more stages per rank, in a loop.

Known schedules compete with orders that list scheduling makes of building blocks, which are moved about: see
`synthesis`. Without a cap a rank holds at most p microbatches, as 1F1B does.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from piper.schedules.synthesis.equal import equal_rows


def rows(
    *,
    num_pipeline_ranks: int,
    num_microbatches: int,
    virtual_stages_per_rank: int,
    costs: Mapping[str, Fraction],
    memory_cap: Fraction | None,
) -> list[list[str]]:
    """Return the best rows that were found under the cap.

    Raises: ValueError for a memory cap below one microbatch.
    """
    counts = (num_pipeline_ranks, num_microbatches, virtual_stages_per_rank)
    return equal_rows("loop", counts, costs=costs, memory_cap=memory_cap)

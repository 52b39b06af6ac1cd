"""Synthesized in a V: found for the costs of the passes under a memory cap; two stages per rank, down and up.

As `synthesized`, for the stages of ZBV: the first rank also has the last stage. See `synthesis`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from piper.schedules.limits import require_two_stages
from piper.schedules.rows import laid_out
from piper.schedules.synthesis.equal import equal_rows


@laid_out("v")
def rows(
    *,
    num_pipeline_ranks: int,
    num_microbatches: int,
    virtual_stages_per_rank: int,
    costs: Mapping[str, Fraction],
    memory_cap: Fraction | None,
) -> list[list[str]]:
    """Return the best rows that were found under the cap.

    Raises: ValueError unless each rank holds two stages, or for a memory cap below one microbatch.
    """
    require_two_stages("synthesized_v", virtual_stages_per_rank)
    counts = (num_pipeline_ranks, num_microbatches, virtual_stages_per_rank)
    return equal_rows("v", counts, costs=costs, memory_cap=memory_cap)

"""V-Min: two stages per rank in a V, about a third of the memory of 1F1B, two thirds of its bubble.

Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362), section 3. With
F = BI = BW and p > 1 ranks a rank's span has a bubble of 4 p - 5 passes (4 p - 3 if 3 divides p), where 1F1B
has 6 (p - 1); it grows with the microbatches where passes are unequal. See [Note: building block].
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from piper.schedules.limits import require_memory, require_two_stages
from piper.schedules.rows import laid_out
from piper.schedules.v_shape import Block, v_rows


@laid_out("v")
def rows(
    *,
    num_pipeline_ranks: int,
    num_microbatches: int,
    virtual_stages_per_rank: int,
    costs: Mapping[str, Fraction],
    memory_cap: Fraction | None,
) -> list[list[str]]:
    """Return rows that hold (p + 4) // 3 microbatches at most, or all if there are fewer.

    Raises: ValueError unless each rank holds two stages, or for a memory cap below that.
    """
    require_two_stages("v_min", virtual_stages_per_rank)
    in_flight = (num_pipeline_ranks + 4) // 3
    require_memory("v_min", min(num_microbatches, in_flight), memory_cap)
    blocks = [_block(rank, num_pipeline_ranks) for rank in range(num_pipeline_ranks)]
    return v_rows(blocks, num_microbatches=num_microbatches, most_held=2 * in_flight)


def _block(rank: int, num_pipeline_ranks: int) -> Block:
    """Return a block that goes down and up one slot per rank, in both passes.

    Ways that go down and ways that go up meet on no rank, as their slots differ by an odd number. Two ways
    down (or up) differ by where backward starts, 2 p, or two slots later if that is a multiple of 6.
    """
    down, up = rank, 2 * num_pipeline_ranks - 1 - rank
    backward = 2 * num_pipeline_ranks + (2 if num_pipeline_ranks % 3 == 0 else 0)
    return {
        (down, "F"): rank,
        (up, "F"): 2 * num_pipeline_ranks - 1 - rank,
        (up, "BI"): backward + rank,
        (down, "BI"): backward + 2 * num_pipeline_ranks - 1 - rank,
    }

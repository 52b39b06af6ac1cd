"""V-Half: two stages per rank in a V, half the memory of 1F1B, half its bubble.

Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362), section 3. With
F = BI = BW a rank's span has a bubble of 3 (p - 1) passes or less, where 1F1B has 6 (p - 1). See
[Note: building block].
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
    """Return rows that hold (p + 2) // 2 microbatches at most, or all if there are fewer.

    Raises: ValueError unless each rank holds two stages, or for a memory cap below that.
    """
    require_two_stages("v_half", virtual_stages_per_rank)
    in_flight = (num_pipeline_ranks + 2) // 2
    require_memory("v_half", min(num_microbatches, in_flight), memory_cap)
    blocks = [_block(rank, num_pipeline_ranks) for rank in range(num_pipeline_ranks)]
    return v_rows(blocks, num_microbatches=num_microbatches, most_held=2 * in_flight)


def _block(rank: int, num_pipeline_ranks: int) -> Block:
    """Return a block that goes down two slots per rank, and up one slot per rank, in both passes.

    The way up reaches rank 0 in slot 3 p - 2; backward starts in the first slot behind it that is 3 modulo 6.
    Modulo 3, ranks are then passed in slot -rank on the way down and 1 - rank on the way up; forward and
    backward of one direction differ by 3 modulo 6.
    """
    down, up = rank, 2 * num_pipeline_ranks - 1 - rank
    forward = 3 * num_pipeline_ranks - 2
    backward = 3 * num_pipeline_ranks + (3 if num_pipeline_ranks % 2 == 0 else 0)
    return {
        (down, "F"): 2 * rank,
        (up, "F"): forward - rank,
        (up, "BI"): backward + 2 * rank,
        (down, "BI"): backward + forward - rank,
    }

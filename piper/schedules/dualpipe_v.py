"""DualPipeV: DualPipe folded into a V, so that one copy of the parameters is enough.

Source: the published `dualpipev.py` of the DeepSeek-V3 authors; orders as in torch's `ScheduleDualPipeV`.
Rank r runs stage r (near) on the way down and stage 2p - 1 - r (far) on the way up, in the order of `dual`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from piper.schedules.dual import Slot, dual_row
from piper.schedules.limits import require_memory, require_two_stages
from piper.schedules.rows import laid_out


@laid_out("v")
def rows(
    *,
    num_pipeline_ranks: int,
    num_microbatches: int,
    virtual_stages_per_rank: int,
    costs: Mapping[str, Fraction],
    memory_cap: Fraction | None,
) -> list[list[Slot]]:
    """Return rows in which an F and a B of two stages overlap while both have microbatches.

    p + 1/2 microbatches are in flight on every rank, as 2p + 1 passes of half a rank's layers.
    Raises: ValueError unless each rank holds two stages and there are 2p microbatches, or for a memory cap
        below the need.
    """
    require_two_stages("dualpipe_v", virtual_stages_per_rank)
    if num_microbatches < 2 * num_pipeline_ranks:
        raise ValueError(
            f"dualpipe_v needs a microbatch for each of {2 * num_pipeline_ranks} stages, "
            f"not {num_microbatches}; use {2 * num_pipeline_ranks} or more microbatches"
        )
    require_memory("dualpipe_v", Fraction(2 * num_pipeline_ranks + 1, 2), memory_cap)
    last = 2 * num_pipeline_ranks - 1
    microbatches = range(num_microbatches)
    return [
        dual_row(
            rank, last - rank, row=rank, num_rows=num_pipeline_ranks,
            microbatches={rank: microbatches, last - rank: microbatches},
        )
        for rank in range(num_pipeline_ranks)
    ]  # fmt: skip

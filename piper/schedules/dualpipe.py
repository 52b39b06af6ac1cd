"""DualPipe: microbatches from both ends, two copies of the parameters; F one way overlaps with B the other.

Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 3.2.1 and Table 2, and
the phases of the published `dualpipe.py`, which `dual` lists. With F = BI >= BW the rank that idles most
during a step does so for (p/2 - 1)(FB + B - 3 BW).
The virtual stages p to 2p - 1 are copies of stages 0 to p - 1, see [Note: copies]; copy 0 runs the first half
of the microbatches. On a rank of the first half copy 0 is "near" and copy 1 "far", on others the reverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from piper.schedules.copies import Copies
from piper.schedules.dual import Slot, dual_row
from piper.schedules.limits import require_memory, require_two_stages
from piper.schedules.rows import laid_out


@laid_out("bidirectional")
def rows(
    *,
    num_pipeline_ranks: int,
    num_microbatches: int,
    virtual_stages_per_rank: int,
    costs: Mapping[str, Fraction],
    memory_cap: Fraction | None,
) -> list[list[Slot]]:
    """Return rows in which an F of one copy and a B of the other overlap while both have microbatches.

    p + 1 microbatches are in flight on every rank.
    Raises: ValueError unless each rank holds two stages and ranks and microbatches are even, 2p microbatches
        or more; or for a memory cap below the need.
    """
    require_two_stages("dualpipe", virtual_stages_per_rank)
    _require_halves(num_pipeline_ranks, num_microbatches)
    require_memory("dualpipe", num_pipeline_ranks + 1, memory_cap)
    copies = Copies(num_stages=2 * num_pipeline_ranks, count=2)
    last = num_pipeline_ranks - 1
    found = []
    for rank in range(num_pipeline_ranks):
        down, up = rank, num_pipeline_ranks + last - rank
        near, far = (down, up) if rank < num_pipeline_ranks // 2 else (up, down)
        microbatches = {stage: copies.microbatches(stage, num_microbatches) for stage in (near, far)}
        row = min(rank, last - rank)
        found.append(
            dual_row(near, far, row=row, num_rows=num_pipeline_ranks // 2, microbatches=microbatches)
        )
    return found


def _require_halves(num_pipeline_ranks: int, num_microbatches: int) -> None:
    """Raise with the nearest legal counts unless both are even, with 2p microbatches or more."""
    if num_pipeline_ranks % 2:
        near = " or ".join(str(p) for p in (num_pipeline_ranks - 1, num_pipeline_ranks + 1) if p)
        raise ValueError(
            f"dualpipe pairs the ranks of both halves: {num_pipeline_ranks} is odd; use {near} ranks"
        )
    fewest = 2 * num_pipeline_ranks
    if num_microbatches < fewest:
        raise ValueError(
            f"dualpipe on {num_pipeline_ranks} ranks needs {fewest} microbatches, not {num_microbatches}; "
            f"use {fewest} or more, an even number"
        )
    if num_microbatches % 2:
        raise ValueError(
            f"dualpipe sends half of the microbatches each way: {num_microbatches} is odd; "
            f"use {num_microbatches - 1} or {num_microbatches + 1} microbatches"
        )

"""ZB-H1: 1F1B with late weight gradients; a third of the bubble, the memory of 1F1B's first rank on all.

Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), section 2 and Table 2. The
bubble is (p - 1)(F + BI - BW) for p microbatches or more. See [Note: late weight gradients].
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from piper.schedules.alternating import alternating_row
from piper.schedules.limits import require_memory, require_one_stage


def rows(
    *,
    num_pipeline_ranks: int,
    num_microbatches: int,
    virtual_stages_per_rank: int,
    costs: Mapping[str, Fraction],
    memory_cap: Fraction | None,
) -> list[list[str]]:
    """Return p - r - 1 forwards on rank r, then F, BI and, r backwards later, BW in turn.

    min(m, p) microbatches are in flight on every rank.
    Raises: ValueError for virtual stages, or a memory cap below that.
    """
    require_one_stage("zb_h1", virtual_stages_per_rank, instead="interleaved_zb")
    require_memory("zb_h1", min(num_microbatches, num_pipeline_ranks), memory_cap)
    microbatches = range(num_microbatches)
    return [
        alternating_row(
            [f"{rank}F{m}" for m in microbatches],
            [f"{rank}BI{m}" for m in microbatches],
            [f"{rank}BW{m}" for m in microbatches],
            warm_up=num_pipeline_ranks - 1 - rank,
            delay=rank,
        )
        for rank in range(num_pipeline_ranks)
    ]

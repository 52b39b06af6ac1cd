"""ZB-H2: twice the warm-up of ZB-H1, so that ranks with F = BI = BW have no bubble; twice the memory.

Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), section 2 and Table 2. A rank's
span has a bubble of (p - 1)(F + BI - 2 BW) for 2p - 1 microbatches or more: ranks start and end one after
the other, which the optimizer must allow. See [Note: late weight gradients].
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
    """Return 2 (p - r - 1) forwards on rank r, then F, BI and, 2r backwards later, BW in turn.

    min(m, 2p - 1) microbatches are in flight on every rank.
    Raises: ValueError for virtual stages, or a memory cap below that.
    """
    require_one_stage("zb_h2", virtual_stages_per_rank, instead="interleaved_zb")
    require_memory("zb_h2", min(num_microbatches, 2 * num_pipeline_ranks - 1), memory_cap)
    microbatches = range(num_microbatches)
    return [
        alternating_row(
            [f"{rank}F{m}" for m in microbatches],
            [f"{rank}BI{m}" for m in microbatches],
            [f"{rank}BW{m}" for m in microbatches],
            warm_up=2 * (num_pipeline_ranks - 1 - rank),
            delay=2 * rank,
        )
        for rank in range(num_pipeline_ranks)
    ]

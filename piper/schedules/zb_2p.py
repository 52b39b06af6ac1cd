"""ZB-2p: zero bubble found for the costs of the passes, with at most 2p microbatches in flight on a rank.

Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), section 3.1. For m >= cap and
BW <= F the longest span has a bubble of at least (p - 1)(F + BI + 2 comm) - (cap - 1) BW; see `automatic`.
The paper's own figures have less bubble because BW keeps less of a microbatch there: the cost `kept`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from piper.schedules.automatic import automatic_rows
from piper.schedules.limits import require_one_stage, smaller_cap


def rows(
    *,
    num_pipeline_ranks: int,
    num_microbatches: int,
    virtual_stages_per_rank: int,
    costs: Mapping[str, Fraction],
    memory_cap: Fraction | None,
) -> list[list[str]]:
    """Return the best rows under the cap; a smaller memory cap is kept, at the price of bubble.

    Raises: ValueError for virtual stages, or a memory cap below one microbatch.
    """
    require_one_stage("zb_2p", virtual_stages_per_rank, instead="interleaved_zb")
    return automatic_rows(
        num_pipeline_ranks=num_pipeline_ranks,
        num_microbatches=num_microbatches,
        costs=costs,
        cap=smaller_cap(2 * num_pipeline_ranks, memory_cap),
    )

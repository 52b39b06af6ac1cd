"""GPipe: all forward passes, then all backward passes.

Source: Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism".
Backward passes run in the order of the microbatches, as in torch's `ScheduleGPipe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from piper.schedules.limits import require_memory, require_one_stage


def rows(
    *,
    num_pipeline_ranks: int,
    num_microbatches: int,
    virtual_stages_per_rank: int,
    costs: Mapping[str, Fraction],
    memory_cap: Fraction | None,
) -> list[list[str]]:
    """Return F0 .. F(m-1), B0 .. B(m-1) on every rank; m microbatches are in flight.

    Raises: ValueError for virtual stages, or a memory cap below m.
    """
    require_one_stage("gpipe", virtual_stages_per_rank, instead="looped_bfs")
    require_memory("gpipe", num_microbatches, memory_cap)
    microbatches = range(num_microbatches)
    return [
        [*(f"{rank}F{m}" for m in microbatches), *(f"{rank}B{m}" for m in microbatches)]
        for rank in range(num_pipeline_ranks)
    ]

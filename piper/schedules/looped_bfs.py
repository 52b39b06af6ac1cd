"""Looped BFS: all microbatches on a rank's first stage, then on its second, ...; backwards the other way.

Source: Lamy-Poirier 2022, "Breadth-First Pipeline Parallelism" (arXiv 2211.05953); backward passes run from
the last microbatch to the first, as in torch's `ScheduleLoopedBFS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from piper.schedules.alternating import stages_of_ranks
from piper.schedules.limits import require_memory


def rows(
    *,
    num_pipeline_ranks: int,
    num_microbatches: int,
    virtual_stages_per_rank: int,
    costs: Mapping[str, Fraction],
    memory_cap: Fraction | None,
) -> list[list[str]]:
    """Return the forwards of each stage in turn, then the backwards; m microbatches are in flight.

    Raises: ValueError for a memory cap below m.
    """
    require_memory("looped_bfs", num_microbatches, memory_cap)
    microbatches = range(num_microbatches)
    return [
        [f"{stage}F{m}" for stage in stages for m in microbatches]
        + [f"{stage}B{m}" for stage in stages[::-1] for m in microbatches[::-1]]
        for stages in stages_of_ranks(num_pipeline_ranks, virtual_stages_per_rank)
    ]

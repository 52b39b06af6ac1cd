"""Interleaved 1F1B: several stages on each rank take turns, so that the bubble shrinks by their number.

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM" (arXiv 2104.04473), section 2.2; orders as in torch's `ScheduleInterleaved1F1B`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from piper.schedules.alternating import (
    alternating_row,
    microbatches_per_round,
    passes_by_turns,
    stages_of_ranks,
)
from piper.schedules.limits import require_memory


def rows(
    *,
    num_pipeline_ranks: int,
    num_microbatches: int,
    virtual_stages_per_rank: int,
    costs: Mapping[str, Fraction],
    memory_cap: Fraction | None,
) -> list[list[str]]:
    """Return (v - 1) rounds and 2 (p - 1 - r) forwards on rank r, then F and B in turn.

    Rank 0 holds most: (v - 1) rounds + 2p - 1 passes of its v stages (fewer when there are fewer).
    Raises: ValueError for microbatches that do not divide into rounds, or a memory cap below the need.
    """
    per_round = microbatches_per_round(
        "interleaved_1f1b", num_pipeline_ranks=num_pipeline_ranks, num_microbatches=num_microbatches
    )
    passes = num_microbatches * virtual_stages_per_rank
    ahead = (virtual_stages_per_rank - 1) * per_round + 2 * (num_pipeline_ranks - 1)
    held = Fraction(min(passes, ahead + 1), virtual_stages_per_rank)
    require_memory("interleaved_1f1b", held, memory_cap)
    turns = {"num_microbatches": num_microbatches, "per_round": per_round}
    return [
        alternating_row(
            passes_by_turns("F", stages, **turns),
            passes_by_turns("B", stages[::-1], **turns),
            warm_up=min(passes, ahead - 2 * rank),
        )
        for rank, stages in enumerate(stages_of_ranks(num_pipeline_ranks, virtual_stages_per_rank))
    ]

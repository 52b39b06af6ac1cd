"""Interleaved zero bubble: interleaved 1F1B with late weight gradients and half the warm-up.

Source: Qi et al. 2024 (arXiv 2401.10241), the ZB-H1 idea on several stages per rank; orders as in torch's
`ScheduleInterleavedZeroBubble`. With one stage per rank it is ZB-H1. See [Note: late weight gradients].
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
    """Return (v - 1) rounds and p - 1 - r forwards on rank r, then F, BI and, r backwards later, BW in turn.

    Each rank holds (v - 1) rounds + p passes of its v stages (fewer when there are fewer).
    Raises: ValueError for microbatches that do not divide into rounds, or a memory cap below the need.
    """
    per_round = microbatches_per_round(
        "interleaved_zb", num_pipeline_ranks=num_pipeline_ranks, num_microbatches=num_microbatches
    )
    passes = num_microbatches * virtual_stages_per_rank
    ahead = (virtual_stages_per_rank - 1) * per_round + num_pipeline_ranks - 1
    held = Fraction(min(passes, ahead + 1), virtual_stages_per_rank)
    require_memory("interleaved_zb", held, memory_cap)
    turns = {"num_microbatches": num_microbatches, "per_round": per_round}
    return [
        alternating_row(
            passes_by_turns("F", stages, **turns),
            passes_by_turns("BI", stages[::-1], **turns),
            passes_by_turns("BW", stages[::-1], **turns),
            warm_up=min(passes, ahead - rank),
            delay=rank,
        )
        for rank, stages in enumerate(stages_of_ranks(num_pipeline_ranks, virtual_stages_per_rank))
    ]

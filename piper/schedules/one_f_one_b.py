"""1F1B: after a warm-up, one forward and one backward pass in turn, so that activations die early.

Source: Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training"; with a flush
at the end of the step: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM". Also called PipeDream-Flush.
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
    """Return p - r forwards on rank r, then B and F in turn; min(m, p - r) microbatches are in flight.

    Raises: ValueError for virtual stages, or a memory cap below min(m, p).
    """
    require_one_stage("1f1b", virtual_stages_per_rank, instead="interleaved_1f1b")
    require_memory("1f1b", min(num_microbatches, num_pipeline_ranks), memory_cap)
    return [
        _row(rank, min(num_microbatches, num_pipeline_ranks - rank), num_microbatches)
        for rank in range(num_pipeline_ranks)
    ]


def _row(rank: int, warm_up: int, num_microbatches: int) -> list[str]:
    row = [f"{rank}F{m}" for m in range(warm_up)]
    for m in range(num_microbatches):
        row.append(f"{rank}B{m}")
        if warm_up + m < num_microbatches:
            row.append(f"{rank}F{warm_up + m}")
    return row

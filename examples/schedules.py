"""Schedules of your own: functions that return the order of passes on every pipeline rank.

    piper schedules examples/schedules.py:in_pairs --pp 4 --microbatches 8
    piper schedules examples/schedules.py:in_pairs --pp 4 --microbatches 8 --check
    piper simulate tiny-llama --strategy pp=4,schedule=examples/schedules.py:in_pairs

A pass is a code: stage, F | B | BI | BW, microbatch. Transfers follow from the codes; counts that a schedule
has no rows for raise ValueError.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from piper.schedules.automatic import automatic_rows


def in_pairs(
    *,
    num_pipeline_ranks: int,
    num_microbatches: int,
    virtual_stages_per_rank: int,
    costs: Mapping[str, Fraction],
    memory_cap: Fraction | None,
) -> list[list[str]]:
    """Return 1F1B of pairs: two forwards, then two backwards, so that ranks talk half as often."""
    if virtual_stages_per_rank != 1 or num_microbatches % 2:
        raise ValueError("in_pairs wants one stage on each rank and an even number of microbatches")
    pairs = range(num_microbatches // 2)
    rows = []
    for rank in range(num_pipeline_ranks):
        forwards = [[f"{rank}F{2 * pair}", f"{rank}F{2 * pair + 1}"] for pair in pairs]
        backwards = [[f"{rank}B{2 * pair}", f"{rank}B{2 * pair + 1}"] for pair in pairs]
        warm_up = min(num_pipeline_ranks - 1 - rank, len(pairs))
        order = forwards[:warm_up]
        for pair in pairs:
            order += [*forwards[warm_up + pair : warm_up + pair + 1], backwards[pair]]
        rows.append([code for passes in order for code in passes])
    return rows


def three_p(
    *,
    num_pipeline_ranks: int,
    num_microbatches: int,
    virtual_stages_per_rank: int,
    costs: Mapping[str, Fraction],
    memory_cap: Fraction | None,
) -> list[list[str]]:
    """Return zero bubble with three times the memory of 1F1B, for passes as unequal as `--costs` says."""
    if virtual_stages_per_rank != 1:
        raise ValueError("three_p wants one stage on each rank")
    cap = 3 * num_pipeline_ranks if memory_cap is None else int(min(memory_cap, 3 * num_pipeline_ranks))
    return automatic_rows(
        num_pipeline_ranks=num_pipeline_ranks, num_microbatches=num_microbatches, costs=costs, cap=cap
    )

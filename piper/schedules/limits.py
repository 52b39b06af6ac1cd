"""What a schedule refuses: counts that it has no rows for, as ValueError (shown as exit 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from piper.schedules.rows import Rows
from simulator.plan.task import TaskKind

_STAGES_OF_A_V = 2


def require_one_stage(name: str, virtual_stages_per_rank: int, *, instead: str) -> None:
    """Raise unless each rank holds one stage; `instead` is the schedule for several."""
    if virtual_stages_per_rank != 1:
        raise ValueError(
            f"{name} places one stage on each pipeline rank, not {virtual_stages_per_rank}; "
            f"use {instead} for several"
        )


def require_two_stages(name: str, virtual_stages_per_rank: int) -> None:
    """Raise unless each rank holds two stages: one on the way down the ranks, one on the way up."""
    if virtual_stages_per_rank != _STAGES_OF_A_V:
        raise ValueError(
            f"{name} places two stages on each pipeline rank, not {virtual_stages_per_rank}; "
            f"use {_STAGES_OF_A_V} virtual stages per rank"
        )


def require_memory(name: str, in_flight: int | Fraction, memory_cap: Fraction | None) -> None:
    """Raise if the schedule keeps more microbatches in flight than the cap allows."""
    if memory_cap is not None and in_flight > memory_cap:
        raise ValueError(f"{name} keeps {in_flight} microbatches in flight, the memory cap is {memory_cap}")


def smaller_cap(own: int, memory_cap: Fraction | None) -> int:
    """Return the microbatches that fit both into a schedule's own cap and into the one that is asked for."""
    return own if memory_cap is None else min(own, math.floor(memory_cap))


def most_in_flight(rows: Rows, stages: Sequence[Sequence[int]], *, copies: int = 1) -> Fraction:
    """Return the most microbatches of a rank's whole model part between F and B or BW, in order of the rows.

    Args:
        rows: by pipeline rank.
        stages: those of each pipeline rank.
        copies: of the model among the stages.
    """
    most = Fraction(0)
    for row, stages_of_rank in zip(rows, stages, strict=True):
        held = 0
        for slot in row:
            held += sum(task.kind is TaskKind.F for task in slot)
            most = max(most, Fraction(held * copies, len(stages_of_rank)))
            held -= sum(task.kind in {TaskKind.B, TaskKind.BW} for task in slot)
    return most

"""What a schedule refuses: counts that it has no rows for, as ValueError (shown as exit 2)."""

from __future__ import annotations

import math
from fractions import Fraction

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

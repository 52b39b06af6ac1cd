"""What a schedule refuses: counts that it has no rows for, as ValueError (shown as exit 2)."""

from __future__ import annotations

from fractions import Fraction


def require_one_stage(name: str, virtual_stages_per_rank: int, *, instead: str) -> None:
    """Raise unless each rank holds one stage; `instead` is the schedule for several."""
    if virtual_stages_per_rank != 1:
        raise ValueError(
            f"{name} places one stage on each pipeline rank, not {virtual_stages_per_rank}; "
            f"use {instead} for several"
        )


def require_memory(name: str, in_flight: int | Fraction, memory_cap: Fraction | None) -> None:
    """Raise if the schedule keeps more microbatches in flight than the cap allows."""
    if memory_cap is not None and in_flight > memory_cap:
        raise ValueError(f"{name} keeps {in_flight} microbatches in flight, the memory cap is {memory_cap}")

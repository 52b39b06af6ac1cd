"""How a candidate ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from piper.search.candidate import Candidate


class Status(StrEnum):
    """How a candidate ended."""

    RANKED = "ranked"
    MEMORY_BOUND = "does not fit (bound)"
    OUT_OF_MEMORY = "does not fit (simulated)"
    REFUSED = "is simulated, but not run"
    BOUND = "bounded out"
    ESTIMATED = "slower (estimated)"
    NOT_REACHED = "not reached"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One candidate's end.

    Args:
        candidate: which.
        status: how it ended.
        reason: why it is not ranked.
        bound_s: lower bound of its step time.
        result: the shortened simulation.
    """

    candidate: Candidate
    status: Status
    reason: str = ""
    bound_s: float | None = None
    result: dict[str, Any] | None = None

    @property
    def step_time_s(self) -> float:
        """Return the simulated step time, or infinity."""
        return float(self.result["step_time_s"]) if self.result else float("inf")

    def objective_value(self, objective: str) -> float:
        """Return what is minimised."""
        if self.result is None:
            return float("inf")
        return float(self.result["peak_memory_bytes"]) if objective == "memory" else self.step_time_s


def layout_of(candidate: Candidate) -> tuple[object, ...]:
    """Return what makes two candidates more than twins: all but how states are kept."""
    names = ("gpus", "tp", "pp", "vp", "cp", "ep", "etp", "schedule", "recompute", "micro_batch")
    return tuple(getattr(candidate, name) for name in names)

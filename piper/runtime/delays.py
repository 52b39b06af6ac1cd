"""Delays of tasks, drawn from a seed: where a wait is missing, a run under delays fails or differs.

[Note: a thread for each stream]
Usually the main thread runs the compute stream, so that whatever it dispatches later also starts later. Under
delays every stream has a thread of its own and only waits hold tasks back, as on a GPU.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple


class Hold(NamedTuple):
    """A task that does not start before another one is complete, or `Delays.hold_s` are over.

    Args:
        rank, position: the task, by its position in the dispatch order of its rank.
        until: position of the other one.
        next_step: the other one belongs to the next step.
    """

    rank: int
    position: int
    until: int
    next_step: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """How long a task that could start waits first.

    Args:
        seed: of the draws, which also depend on rank, step and task.
        most_s: longest of the drawn delays.
        holds: tasks that others shall overtake, if no wait keeps them from it.
        hold_s: how long these are held at most.
    """

    seed: int
    most_s: float = 1e-3
    holds: tuple[Hold, ...] = ()
    hold_s: float = 0.0

    def before(self, rank: int, *, step: int, position: int) -> float:
        """Return the drawn delay of one task, seconds."""
        return random.Random(f"{self.seed} {rank} {step} {position}").random() * self.most_s

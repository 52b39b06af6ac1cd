"""Which of the constraints of a search contradict each other: a smallest set that leaves no strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

MOST_TOGETHER = 3
"""Constraints of which a set is looked for; larger ones are named as a whole."""

Constraint = tuple[str, str, str]
"""(option, dimension, value), as in ("--pin", "pp", "3")."""


def smallest_conflict(
    constraints: Sequence[Constraint], allows: Callable[[Sequence[Constraint]], bool]
) -> tuple[Constraint, ...]:
    """Return a smallest set of constraints under which no strategy is legal; empty: none is without any.

    Args:
        constraints: of the request.
        allows: whether any strategy is legal under some of them.
    """
    for size in range(min(MOST_TOGETHER, len(constraints)) + 1):
        for chosen in combinations(constraints, size):
            if not allows(chosen):
                return chosen
    return tuple(constraints)


def written(constraints: Sequence[Constraint]) -> str:
    """Return constraints as a user writes them."""
    return " and ".join(f"{option} {name}={value}" for option, name, value in constraints)

"""What directives state about parts of the model: read by the passes, never by the plan's readers.

A fact claims segments. Two that claim the same one are a conflict, which the directive that comes second
reports with both lines (`require_unclaimed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from piper.errors import StrategyError


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """Parameters that all replicas keep equal, and how their state is cut over the replicas.

    Args:
        segments: whose parameters.
        zero: 0 nothing is cut; 1 optimizer state.
        where: file and line.
    """

    segments: tuple[int, ...]
    zero: int = 0
    where: str = "strategy"


def require_unclaimed(
    claimed: Sequence[Replication], segments: Sequence[int], *, where: str, op: str, value: object
) -> None:
    """Raise StrategyError when a fact already claims one of the segments; names both lines."""
    wanted = set(segments)
    for fact in claimed:
        taken = wanted.intersection(fact.segments)
        if taken:
            raise StrategyError(
                where=where, field=f"{op}.filter", value=value,
                rule=f"claims segment {min(taken)}, which the {op} at {fact.where} already claims",
                fix=f"let each region be claimed by one {op}",
            )  # fmt: skip

"""`Violation`: one reason why a plan is illegal."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One reason why a plan is illegal.

    Args:
        rule: stable id of the broken rule, e.g. "circular-wait".
        message: what is wrong, naming ranks, tasks and buffers.
        tasks: the tasks involved, as "rank 1: 2F0".
    """

    rule: str
    message: str
    tasks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"

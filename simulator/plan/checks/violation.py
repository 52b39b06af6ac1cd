"""`Violation`: one reason why a plan is illegal."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One reason why a plan is illegal.

    Args:
        rule: stable id of the broken rule, e.g. "circular-wait".
        message: what is wrong, naming ranks, tasks and buffers.
        tasks: the tasks involved, as "rank 1: 2F0"; of a cycle all of it, in order.
        stages: stages involved where no task says it (a task that is missing).
        directives: what of the strategy it comes from, as "order (strategy.json:14)"; empty: unknown.
    """

    rule: str
    message: str
    tasks: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()
    directives: tuple[str, ...] = ()

    def __str__(self) -> str:
        origin = f" [{', '.join(self.directives)}]" if self.directives else ""
        return f"{self.rule}: {self.message}{origin}"

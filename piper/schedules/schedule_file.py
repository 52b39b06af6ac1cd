"""A schedule in a CSV file: what each pipeline rank does in order, passes and (if listed) transfers.

`load_schedule_file` tells the two forms apart by their first line: `csv_table` (a header with a column
`rank`) and `csv_torch` (one line per rank). Stages lie on the ranks whose lines run them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path

from cost_models.documents import UnreadableError, read_text
from piper.errors import StrategyError
from piper.schedules.entries import Entry
from piper.schedules.limits import most_in_flight, require_memory
from piper.schedules.rows import Rows, stages_by_rank
from simulator.plan.task import TaskKind, TaskName

MOST_NUMBERED = 2**22
"""Stages times microbatches of a file; a slip of the keyboard would otherwise fill the memory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ScheduleFile:
    """What a schedule file says; called as a schedule function, it gives its rows.

    Args:
        where: path of the file.
        entries: by pipeline rank, in order.
    """

    where: str
    entries: tuple[tuple[Entry, ...], ...]

    @cached_property
    def rows(self) -> Rows:
        """Return the passes alone."""
        return tuple(tuple(entry.passes for entry in row if entry.passes) for row in self.entries)

    @cached_property
    def stage_of_rank(self) -> tuple[tuple[int, ...], ...]:
        """Return the stages of each pipeline rank: those whose first pass stands in its row."""
        owner: dict[int, int] = {}
        for rank, row in enumerate(self.rows):
            for task in (task for slot in row for task in slot):
                owner.setdefault(task.stage, rank)
        return tuple(
            tuple(sorted(stage for stage, held in owner.items() if held == rank))
            for rank in range(len(self.rows))
        )

    @cached_property
    def copies(self) -> int:
        """Return 2 if the file runs stages in two directions, else 1; see [Note: copies].

        Then each rank r of P runs stages r and 2P - 1 - r, and stages from P on run other microbatches, with
        higher numbers, than those below.
        """
        num_ranks = len(self.rows)
        if self.stage_of_rank != stages_by_rank(num_ranks, 2, layout="bidirectional"):
            return 1
        below, above = (
            [task.microbatch for task in self._passes() if (task.stage >= num_ranks) is upper]
            for upper in (False, True)
        )
        return 2 if max(below) < min(above) else 1

    @property
    def num_pipeline_ranks(self) -> int:
        """Return the number of ranks that the file lists."""
        return len(self.entries)

    @property
    def virtual_stages_per_rank(self) -> int:
        """Return the stages of the rank that has most."""
        return max([1, *(len(held) for held in self.stage_of_rank)])

    @cached_property
    def num_microbatches(self) -> int:
        """Return one more than the last microbatch that is listed."""
        return 1 + max((task.microbatch for task in self._passes()), default=0)

    @property
    def lists_transfers(self) -> bool:
        """Tell whether any send or receive is listed."""
        return any(entry.transfers for row in self.entries for entry in row)

    @property
    def is_excerpt(self) -> bool:
        """Tell whether the file shows a part of a step: no stage runs its first microbatch forward."""
        return not any(task.kind is TaskKind.F and task.microbatch == 0 for task in self._passes())

    def __call__(
        self,
        *,
        num_pipeline_ranks: int,
        num_microbatches: int,
        virtual_stages_per_rank: int,
        costs: Mapping[str, Fraction],
        memory_cap: Fraction | None,
    ) -> Rows:
        """Return the rows, as every schedule function does.

        Raises: ValueError for counts other than the file's, or a memory cap below its need.
        """
        for what, given, listed in (
            ("pipeline ranks", num_pipeline_ranks, self.num_pipeline_ranks),
            ("microbatches", num_microbatches, self.num_microbatches),
            ("stages on a rank", virtual_stages_per_rank, self.virtual_stages_per_rank),
        ):
            if given != listed:
                raise ValueError(f"the file lists {listed} {what}, not {given}; ask for {listed}")
        if memory_cap is not None:
            held = most_in_flight(self.rows, self.stage_of_rank, copies=self.copies)
            require_memory(self.where, held, memory_cap)
        return self.rows

    def _passes(self) -> list[TaskName]:
        return [task for row in self.rows for slot in row for task in slot]


def is_schedule_file(text: str) -> bool:
    """Tell whether a schedule's name is a path of a CSV file."""
    return text.lower().endswith(".csv")


def load_schedule_file(path: str, *, field: str = "schedule", where: str = "strategy") -> ScheduleFile:
    """Read a schedule file of either form.

    Raises: StrategyError if the file cannot be read; with file:line for a cell that is no task.
    """
    from piper.schedules import csv_table, csv_torch

    try:
        text = read_text(Path(path))
    except UnreadableError as problem:
        raise StrategyError(
            where=where, field=field, value=path, rule=f"names a file that {problem.rule}",
            fix="give an existing file; `piper schedules 1f1b --pp 4 --microbatches 8 --csv F` writes one",
        ) from problem  # fmt: skip
    form = csv_table if csv_table.is_table(text) else csv_torch
    found = ScheduleFile(where=path, entries=form.read(text, where=path))
    _require_sane(found)
    return found


def _require_sane(found: ScheduleFile) -> None:
    stages = 1 + max((stage for held in found.stage_of_rank for stage in held), default=0)
    if not any(found.entries):
        rule, value = "lists nothing", 0
    elif stages * found.num_microbatches > MOST_NUMBERED:
        rule = f"are more than {MOST_NUMBERED}, the most of a step"
        value = stages * found.num_microbatches
    else:
        return
    raise StrategyError(
        where=found.where, field="passes", value=value, rule=rule,
        fix="list one line per pipeline rank, such as 0F0,0F1,0B0,0B1",
    )  # fmt: skip

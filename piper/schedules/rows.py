"""Rows: the order of passes on each pipeline rank, as typed task names, and what makes them legal."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeGuard, TypeVar

from piper.errors import StrategyError
from piper.schedules.copies import Copies
from piper.schedules.legality import Columns, blocked, miscounted, misplaced
from simulator.errors import PlanError
from simulator.plan.task import NONE, TaskKind, TaskName

Slot = tuple[TaskName, ...]
"""Passes that start together; usually one."""
Rows = tuple[tuple[Slot, ...], ...]
"""By pipeline rank, the slots in order."""
RawRows = Sequence[Sequence[str | Sequence[str]]]
"""What a schedule function returns: codes such as "2F0", or lists of codes that overlap."""

_KINDS = {kind.name: kind for kind in (TaskKind.F, TaskKind.B, TaskKind.BI, TaskKind.BW)}
_PASS = re.compile(f"([0-9]+)({'|'.join(_KINDS)})([0-9]+)")
LAYOUTS = ("loop", "v", "bidirectional")
Layout = str | tuple[tuple[int, ...], ...]
"""How stages lie on ranks: a name of `LAYOUTS`, or by rank its stages."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


def laid_out(layout: Layout) -> Callable[[_Function], _Function]:
    """Return a decorator that says how a schedule function lays stages on ranks, as `stage_of_rank`."""

    def decorate(function: _Function) -> _Function:
        vars(function)["stage_of_rank"] = layout
        return function

    return decorate


def stages_by_rank(
    num_pipeline_ranks: int, virtual_stages_per_rank: int, *, layout: Layout = "loop"
) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each pipeline rank.

    "loop": rank r holds r, r + p, r + 2p, ...; "v": every second round runs backwards (r and 2p - 1 - r);
    "bidirectional": the same numbers, but stages p to 2p - 1 are copies, see [Note: copies]; or the stages of
    each rank themselves, as a schedule file says them.
    Raises: StrategyError for another layout.
    """
    if isinstance(layout, tuple):
        return layout
    if layout not in LAYOUTS:
        raise StrategyError(
            where="schedule",
            field="stage_of_rank",
            value=layout,
            rule="must be 'loop', 'v' or 'bidirectional'",
            fix="set the attribute stage_of_rank of the schedule function to one of these",
        )
    last = num_pipeline_ranks - 1
    return tuple(
        tuple(
            turn * num_pipeline_ranks + (last - rank if layout != "loop" and turn % 2 else rank)
            for turn in range(virtual_stages_per_rank)
        )
        for rank in range(num_pipeline_ranks)
    )


def parse_rows(raw: object, *, where: str) -> Rows:
    """Read codes into task names.

    Raises: StrategyError naming the rank and slot of whatever is not a pass of a stage and microbatch.
    """
    if not _is_list(raw) or not all(_is_list(row) for row in raw):
        raise StrategyError(
            where=where,
            field="rows",
            value=type(raw).__name__,
            rule="must be a list of slots for each pipeline rank",
            fix='return for example [["0F0", "0B0"], ["1F0", "1B0"]]',
        )
    return tuple(_parse_row(row, where=f"{where}: pipeline rank {rank}") for rank, row in enumerate(raw))


def show_rows(rows: Rows) -> list[list[str | list[str]]]:
    """Return rows as codes: the inverse of `parse_rows`."""
    return [
        [slot[0].code if len(slot) == 1 else [task.code for task in slot] for slot in row] for row in rows
    ]


def validate_rows(
    rows: Rows,
    *,
    stages: Sequence[Sequence[int]],
    num_microbatches: int,
    copies: int = 1,
    where: str = "schedule",
) -> None:
    """Raise unless `row_violations` finds nothing.

    Raises: StrategyError with the first violation and how many there are.
    """
    found = row_violations(rows, stages=stages, num_microbatches=num_microbatches, copies=copies)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise StrategyError(
            where=where,
            field="rows",
            value=len(found),
            rule=f"violations, must be none: {found[0]}{more}",
            fix="list F and B of every stage and microbatch once, on its rank, in an order that can run",
        )


def row_violations(
    rows: Rows, *, stages: Sequence[Sequence[int]], num_microbatches: int, copies: int = 1
) -> tuple[str, ...]:
    """Return every reason why the rows are no schedule.

    Args:
        rows: the order of each pipeline rank.
        stages: the stages of each pipeline rank, as `stages_by_rank` returns them.
        num_microbatches: microbatches per step.
        copies: of the model among the stages; see [Note: copies].

    Each stage needs F once and B once (or BI and BW once each) of every microbatch of its copy, on the rank
    that holds the stage, and the rows must be able to run: F after F of the stage before, B (BI) after its F
    and after the B (BI) of the stage behind, BW after its BI, each rank in its order.
    """
    columns = Columns.of(rows)
    found = _pass_violations(columns, stages, num_microbatches=num_microbatches, copies=copies)
    return found or tuple(blocked(columns, Copies(num_stages=sum(map(len, stages)), count=copies)))


def pass_violations(
    rows: Rows, *, stages: Sequence[Sequence[int]], num_microbatches: int, copies: int = 1
) -> tuple[str, ...]:
    """Return the passes that `row_violations` finds missing, repeated or misplaced, whatever their order."""
    columns = Columns.of(rows)
    return _pass_violations(columns, stages, num_microbatches=num_microbatches, copies=copies)


def _pass_violations(
    columns: Columns, stages: Sequence[Sequence[int]], *, num_microbatches: int, copies: int
) -> tuple[str, ...]:
    if len(columns.rows) != len(stages):
        return (f"there are {len(columns.rows)} rows for {len(stages)} pipeline ranks",)
    num_stages = sum(map(len, stages))
    for what, number in (("stages", num_stages), ("microbatches", num_microbatches)):
        if number % copies:
            return (f"{number} {what} cannot be divided between {copies} copies",)
    order = Copies(num_stages=num_stages, count=copies)
    return (*misplaced(columns, stages, num_microbatches), *miscounted(columns, order, num_microbatches))


def _parse_row(row: Sequence[object], *, where: str) -> tuple[Slot, ...]:
    try:
        return tuple(map(_slot_of_code, row))
    except (ValueError, TypeError):
        return tuple(_parse_slot(slot, where=f"{where} slot {number}") for number, slot in enumerate(row))


@lru_cache(maxsize=1 << 17)
def _slot_of_code(code: str) -> Slot:
    """Return the slot of one code; raises ValueError or TypeError for what `_parse_slot` must look at."""
    match = _PASS.fullmatch(code)
    if match is None:
        raise ValueError(code)
    stage, kind, microbatch = match.groups()
    return (TaskName(kind=_KINDS[kind], stage=int(stage), microbatch=int(microbatch)),)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _parse_slot(slot: object, *, where: str) -> Slot:
    codes = slot if _is_list(slot) else (slot,)
    if not codes:
        raise _slot_error(slot, where=where)
    return tuple(_parse_code(code, where=where) for code in codes)


def _parse_code(code: object, *, where: str) -> TaskName:
    if isinstance(code, TaskName):
        task = code
    elif isinstance(code, str):
        try:
            task = _task_name(code)
        except PlanError as error:
            raise _slot_error(code, where=where) from error
    else:
        raise _slot_error(code, where=where)
    if (
        task.kind.name not in _KINDS
        or NONE in {task.stage, task.microbatch}
        or task.part != NONE
        or task.bucket
    ):
        raise _slot_error(task.code, where=where)
    return task


@lru_cache(maxsize=1 << 16)
def _task_name(code: str) -> TaskName:
    return TaskName.parse(code)


def _slot_error(value: object, *, where: str) -> StrategyError:
    return StrategyError(
        where=where,
        field="slot",
        value=value,
        rule="must be stage, F, B, BI or BW, and microbatch, or a list of such codes that overlap",
        fix="write for example 2F0 or 1B3",
    )

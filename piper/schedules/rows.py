"""Rows: the order of passes on each pipeline rank, as typed task names, and what makes them legal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeGuard, TypeVar

from piper.errors import StrategyError
from piper.schedules.copies import Copies
from simulator.errors import PlanError
from simulator.plan.task import NONE, TaskKind, TaskName

Slot = tuple[TaskName, ...]
"""Passes that start together; usually one."""
Rows = tuple[tuple[Slot, ...], ...]
"""By pipeline rank, the slots in order."""
RawRows = Sequence[Sequence[str | Sequence[str]]]
"""What a schedule function returns: codes such as "2F0", or lists of codes that overlap."""

_KINDS = (TaskKind.F, TaskKind.B, TaskKind.BI, TaskKind.BW)
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
    found = pass_violations(rows, stages=stages, num_microbatches=num_microbatches, copies=copies)
    return found or tuple(_blocked(rows, Copies(num_stages=sum(map(len, stages)), count=copies)))


def pass_violations(
    rows: Rows, *, stages: Sequence[Sequence[int]], num_microbatches: int, copies: int = 1
) -> tuple[str, ...]:
    """Return the passes that `row_violations` finds missing, repeated or misplaced, whatever their order."""
    if len(rows) != len(stages):
        return (f"there are {len(rows)} rows for {len(stages)} pipeline ranks",)
    num_stages = sum(map(len, stages))
    for what, number in (("stages", num_stages), ("microbatches", num_microbatches)):
        if number % copies:
            return (f"{number} {what} cannot be divided between {copies} copies",)
    shares = Copies(num_stages=num_stages, count=copies)
    return (
        *_misplaced(rows, stages, num_microbatches),
        *_miscounted(rows, shares, num_microbatches),
    )


def _parse_row(row: Sequence[object], *, where: str) -> tuple[Slot, ...]:
    return tuple(_parse_slot(slot, where=f"{where} slot {number}") for number, slot in enumerate(row))


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
    if task.kind not in _KINDS or NONE in {task.stage, task.microbatch} or task.part != NONE or task.bucket:
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


def _misplaced(rows: Rows, stages: Sequence[Sequence[int]], num_microbatches: int) -> Iterator[str]:
    owner = {stage: rank for rank, held in enumerate(stages) for stage in held}
    for rank, row in enumerate(rows):
        for task in (task for slot in row for task in slot):
            if task.stage not in owner:
                yield f"{task.code} of rank {rank}: there are only stages 0..{len(owner) - 1}"
            elif task.microbatch >= num_microbatches:
                yield f"{task.code} of rank {rank}: there are only microbatches 0..{num_microbatches - 1}"
            elif owner[task.stage] != rank:
                yield f"{task.code} stands on rank {rank}, but stage {task.stage} is on {owner[task.stage]}"


def _miscounted(rows: Rows, copies: Copies, num_microbatches: int) -> Iterator[str]:
    num_stages = copies.num_stages
    counts = {kind: [[0] * num_microbatches for _ in range(num_stages)] for kind in _KINDS}
    for task in (task for row in rows for slot in row for task in slot):
        if task.stage < num_stages and task.microbatch < num_microbatches:
            counts[task.kind][task.stage][task.microbatch] += 1
    for stage in range(num_stages):
        own = copies.microbatches(stage, num_microbatches)
        for microbatch in range(num_microbatches):
            forward, *backward = (counts[kind][stage][microbatch] for kind in _KINDS)
            where = f"stage {stage} microbatch {microbatch}"
            if microbatch not in own:
                if forward or any(backward):
                    yield f"{where}: this copy of the model runs only microbatches {own[0]}..{own[-1]}"
                continue
            if forward != 1:
                yield f"{where}: F stands {forward} times, must be once"
            if backward not in ([1, 0, 0], [0, 1, 1]):
                shown = ", ".join(f"{n} {kind.name}" for kind, n in zip(_KINDS[1:], backward, strict=True))
                yield f"{where}: there are {shown}, must be 1 B, or 1 BI and 1 BW"


def _blocked(rows: Rows, copies: Copies) -> Iterator[str]:
    """Run the rows on dataflow alone; yield the slot at which each rank is stuck for ever."""
    done: set[_Result] = set()
    waiting: dict[_Result, list[int]] = {}
    place = [0] * len(rows)
    ready = list(range(len(rows)))
    while ready:
        rank = ready.pop()
        while place[rank] < len(rows[rank]):
            slot = rows[rank][place[rank]]
            missing = _missing(slot, done, copies)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            place[rank] += 1
            for result in filter(None, map(_result, slot)):
                done.add(result)
                ready += waiting.pop(result, ())
    for rank, row in enumerate(rows):
        if place[rank] < len(row):
            slot = row[place[rank]]
            need = _missing(slot, done, copies)
            codes = " and ".join(task.code for task in slot)
            yield f"rank {rank} is stuck at slot {place[rank]}, {codes}, which needs {_shown(need)}"


_Result = tuple[bool, int, int]
"""What a pass gives: whether it is a gradient, stage, microbatch."""


def _result(task: TaskName) -> _Result | None:
    """Return what a pass gives: the output (F), the input's gradient (B, BI), nothing to others (BW)."""
    if task.kind is TaskKind.BW:
        return None
    return task.kind is not TaskKind.F, task.stage, task.microbatch


def _needs(task: TaskName, copies: Copies) -> tuple[_Result, ...]:
    stage, microbatch = task.stage, task.microbatch
    if task.kind is TaskKind.F:
        before = copies.goal(stage, forward=False)
        return () if before == NONE else ((False, before, microbatch),)
    if task.kind is TaskKind.BW:
        return ((True, stage, microbatch),)
    own = (False, stage, microbatch)
    behind = copies.goal(stage, forward=True)
    return (own,) if behind == NONE else (own, (True, behind, microbatch))


def _missing(slot: Slot, done: set[_Result], copies: Copies) -> _Result | None:
    return next((need for task in slot for need in _needs(task, copies) if need not in done), None)


def _shown(need: _Result | None) -> str:
    return "" if need is None else f"{need[1]}{'B' if need[0] else 'F'}{need[2]}"

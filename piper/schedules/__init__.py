"""Schedules by name: the order in which each pipeline rank runs forward and backward passes.

To add a schedule: write `piper/schedules/<name>.py` with a function

    rows(*, num_pipeline_ranks, num_microbatches, virtual_stages_per_rank, costs, memory_cap)

that returns, per pipeline rank, a list of slots; a slot is a code such as "2F0" (stage, F | B | BI | BW,
microbatch), or a list of codes that overlap. Transfers follow from the codes. A count that the schedule
has no rows for raises ValueError. `rows.stage_of_rank` says how stages lie on the ranks: "loop" (default,
rank r holds r, r + p, ...), "v" (down and up), or "bidirectional" (down, and a copy of the model up; see
`copies`). Add one line to `SCHEDULES`; the contract tests run over every line: each microbatch F and B once
per stage, on the right rank, and the rows can run.

A user's schedule needs no line: `schedule=my.py:function`, `schedule=my.csv`, or `register`. Other files of
this folder: `rows` (typed rows and what makes them legal), `copies`, `costs`, `limits`, `user_file`;
`alternating`, `v_shape` and `dual` (rows that several schedules share), `automatic` (rows under a memory
cap), `synthesis` (rows found for unequal stages, too); `preview`, `minimal_plan` and `gantt` (a schedule
simulated and drawn without a model); `schedule_file`, `entries`, `csv_torch`, `csv_table` and `file_check`
(schedules in CSV files).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from types import ModuleType
from typing import Any

from cost_models.errors import nearest, require_positive_int
from piper.errors import StrategyError
from piper.schedules import (
    dualpipe,
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    interleaved_zb,
    looped_bfs,
    one_f_one_b,
    synthesized,
    synthesized_v,
    v_half,
    v_min,
    zb_1p,
    zb_2p,
    zb_h1,
    zb_h2,
    zbv,
)
from piper.schedules.costs import Costs, parse_costs
from piper.schedules.limits import most_in_flight, require_memory
from piper.schedules.rows import Layout, Rows, Slot, parse_rows, show_rows, stages_by_rank, validate_rows
from piper.schedules.schedule_file import ScheduleFile, is_schedule_file, load_schedule_file
from piper.schedules.user_file import is_user_function, load_user_function, place_of
from piper.user_code import user_code

MOST_PASSES = 2**22
"""Forward passes of all stages in one step: each is a slot, and a task of the plan, so that a slip of the
keyboard would fill the memory."""

ScheduleFunction = Callable[..., Any]
"""A function in the form above."""

SCHEDULES: dict[str, ModuleType] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "looped_bfs": looped_bfs,
    "interleaved_zb": interleaved_zb,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_1p": zb_1p,
    "zb_2p": zb_2p,
    "zbv": zbv,
    "v_half": v_half,
    "v_min": v_min,
    "dualpipe": dualpipe,
    "dualpipe_v": dualpipe_v,
    "synthesized": synthesized,
    "synthesized_v": synthesized_v,
}

_REGISTERED: dict[str, ScheduleFunction] = {}


def register(name: str, function: ScheduleFunction) -> None:
    """Make `schedule=name` mean `function` in this process.

    Raises: StrategyError if the name is taken, or `function` cannot be called.
    """
    taken = name in SCHEDULES or _REGISTERED.get(name, function) is not function
    if taken or not name or not callable(function):
        raise StrategyError(
            where="register_schedule",
            field="name" if callable(function) else "function",
            value=name if callable(function) else repr(function),
            rule="is taken" if taken else "must be a new name and a function",
            fix="give a name of your own and a function that returns rows",
        )
    _REGISTERED[name] = function


def find_schedule(name: str, *, where: str = "strategy") -> ScheduleFunction:
    """Return the function of a schedule: a name, `my.py:function`, or a CSV file.

    Raises: StrategyError for an unknown name (did you mean).
    """
    if is_user_function(name):
        return load_user_function(name, where=where)
    if is_schedule_file(name):
        return load_schedule_file(name, where=where)
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name.lower() in SCHEDULES:
        found: ScheduleFunction = SCHEDULES[name.lower()].rows
        return found
    fix = nearest(name, [*SCHEDULES, *_REGISTERED])
    raise StrategyError(where=where, field="schedule", value=name, rule="is not known", fix=fix)


def schedule_rows(
    name: str,
    *,
    num_pipeline_ranks: int,
    num_microbatches: int,
    virtual_stages_per_rank: int = 1,
    costs: Costs | None = None,
    memory_cap: Fraction | None = None,
    where: str = "strategy",
) -> Rows:
    """Return the checked rows of a schedule.

    Args:
        name: as `find_schedule` takes it.
        num_pipeline_ranks, num_microbatches, virtual_stages_per_rank: all >= 1.
        costs: of the passes, for schedules that weigh them (default: F = BI = BW = 1).
        memory_cap: most microbatches in flight on a rank, or None.
        where: what the user gave, for errors.

    Raises: StrategyError for unknown names, counts that the schedule refuses, and rows that cannot run.
    """
    function, counts = _asked(
        name, num_pipeline_ranks, num_microbatches, vp=virtual_stages_per_rank, where=where
    )
    exact = tuple((parse_costs() if costs is None else costs).items())
    with _user_errors(name, function, where):
        return _checked_rows(function, counts, costs=exact, memory_cap=memory_cap, where=f"{where}: {name}")


def unchecked_rows(
    name: str,
    *,
    num_pipeline_ranks: int,
    num_microbatches: int,
    virtual_stages_per_rank: int = 1,
    costs: Costs | None = None,
    memory_cap: Fraction | None = None,
    where: str = "strategy",
) -> Rows:
    """Return the rows of a schedule as they are: what `rows.row_violations` takes.

    Args are those of `schedule_rows`.
    Raises: StrategyError for unknown names, counts that the schedule refuses, and what is no pass.
    """
    function, counts = _asked(
        name, num_pipeline_ranks, num_microbatches, vp=virtual_stages_per_rank, where=where
    )
    exact = tuple((parse_costs() if costs is None else costs).items())
    with _user_errors(name, function, where):
        return _rows_of(function, counts, costs=exact, memory_cap=memory_cap, where=f"{where}: {name}")


def stages_of(
    name: str, *, num_pipeline_ranks: int, virtual_stages_per_rank: int = 1, where: str = "strategy"
) -> tuple[tuple[int, ...], ...]:
    """Return the stages that the schedule puts on each pipeline rank.

    Raises: StrategyError for an unknown name.
    """
    layout = layout_of(find_schedule(name, where=where))
    return stages_by_rank(num_pipeline_ranks, virtual_stages_per_rank, layout=layout)


def default_virtual_stages(name: str, *, where: str = "strategy") -> int:
    """Return the virtual stages per rank that a schedule implies: those of a file, 2 in a V, else 1.

    Raises: StrategyError for an unknown name.
    """
    function = find_schedule(name, where=where)
    if isinstance(function, ScheduleFile):
        return function.virtual_stages_per_rank
    return 1 if layout_of(function) == "loop" else 2


def layout_of(function: ScheduleFunction) -> Layout:
    """Return how the schedule lays stages on ranks: a name of `rows.LAYOUTS`, or the stages of each rank."""
    layout: Layout = getattr(function, "stage_of_rank", "loop")
    return layout


def copies_of(function: ScheduleFunction) -> int:
    """Return the copies of the model among a schedule's stages: 1, or 2 in two directions; [Note: copies]."""
    if isinstance(function, ScheduleFile):
        return function.copies
    return 2 if layout_of(function) == "bidirectional" else 1


_Counts = tuple[int, int, int]
"""Pipeline ranks, microbatches, virtual stages per rank."""


def _asked(
    name: str, num_pipeline_ranks: int, num_microbatches: int, *, vp: int, where: str
) -> tuple[ScheduleFunction, _Counts]:
    """Return the function and the counts, all whole and positive."""
    for field, value in (
        ("num_pipeline_ranks", num_pipeline_ranks),
        ("num_microbatches", num_microbatches),
        ("virtual_stages_per_rank", vp),
    ):
        fix = "give a whole number >= 1"
        require_positive_int(value, where=where, field=field, fix=fix, error=StrategyError)
    most = MOST_PASSES // (num_pipeline_ranks * vp)
    if num_microbatches > most:
        raise StrategyError(
            where=where, field="num_microbatches", value=num_microbatches,
            rule=f"is more than {most}, the most with {num_pipeline_ranks} x {vp} stages",
            fix="use fewer microbatches or stages",
        )  # fmt: skip
    return find_schedule(name, where=where), (num_pipeline_ranks, num_microbatches, vp)


@contextmanager
def _user_errors(name: str, function: ScheduleFunction, where: str) -> Iterator[None]:
    """Turn what a schedule function raises into StrategyError; other errors of our own schedules stay."""
    own = not _is_users(function)
    try:
        yield
    except StrategyError:
        raise
    except ValueError as error:
        fix = "change the number of stages, microbatches or the memory cap, or take another schedule"
        rule = f"cannot be used: {error}{'' if own else place_of(error, function)}"
        raise StrategyError(where=where, field="schedule", value=name, rule=rule, fix=fix) from error
    except Exception as error:
        if own:
            raise
        rule = f"fails: {type(error).__name__}: {error}{place_of(error, function)}"
        fix = "make the function return rows for these counts, or raise ValueError"
        raise StrategyError(where=where, field="schedule", value=name, rule=rule, fix=fix) from error


@lru_cache(maxsize=64)
def _checked_rows(
    function: ScheduleFunction,
    counts: _Counts,
    *,
    costs: tuple[tuple[str, Fraction], ...],
    memory_cap: Fraction | None,
    where: str,
) -> Rows:
    """Return checked rows; a search asks for the same ones again and again."""
    rows = _rows_of(function, counts, costs=costs, memory_cap=memory_cap, where=where)
    num_pipeline_ranks, num_microbatches, vp = counts
    stages = stages_by_rank(num_pipeline_ranks, vp, layout=layout_of(function))
    copies = copies_of(function)
    validate_rows(rows, stages=stages, num_microbatches=num_microbatches, copies=copies, where=where)
    return rows


def _rows_of(
    function: ScheduleFunction,
    counts: _Counts,
    *,
    costs: tuple[tuple[str, Fraction], ...],
    memory_cap: Fraction | None,
    where: str,
) -> Rows:
    num_pipeline_ranks, num_microbatches, virtual_stages_per_rank = counts
    with user_code():
        raw = function(
            num_pipeline_ranks=num_pipeline_ranks,
            num_microbatches=num_microbatches,
            virtual_stages_per_rank=virtual_stages_per_rank,
            costs=dict(costs),
            memory_cap=memory_cap,
        )
    rows = parse_rows(raw, where=where)
    if memory_cap is not None and _is_users(function) and len(rows) == num_pipeline_ranks:
        stages = stages_by_rank(num_pipeline_ranks, virtual_stages_per_rank, layout=layout_of(function))
        require_memory("it", most_in_flight(rows, stages, copies=copies_of(function)), memory_cap)
    return rows


def _is_users(function: ScheduleFunction) -> bool:
    """Tell whether a function is the user's: those of the table and files keep to the cap themselves."""
    return not isinstance(function, ScheduleFile) and all(function is not m.rows for m in SCHEDULES.values())


__all__ = [
    "MOST_PASSES",
    "SCHEDULES",
    "Costs",
    "Rows",
    "ScheduleFile",
    "ScheduleFunction",
    "Slot",
    "copies_of",
    "default_virtual_stages",
    "find_schedule",
    "layout_of",
    "parse_costs",
    "register",
    "schedule_rows",
    "show_rows",
    "stages_of",
    "unchecked_rows",
    "validate_rows",
]

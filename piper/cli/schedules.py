"""`piper schedules`: the pipeline schedules by name, or one of them alone, without a model."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cost_models.errors import InputError
from piper.cli.catalogue import show_list
from piper.cli.options import PositiveInt, PositiveNumber, json_option
from piper.cli.output import emit, terminal_width

if TYPE_CHECKING:
    from piper.schedules import Costs
    from piper.schedules.preview import Preview


@click.command()
@click.argument("name", metavar="[NAME|FILE.csv|FILE.py:FUNCTION]", required=False)
@click.option("--pp", type=PositiveInt(4), metavar="P", help="Pipeline ranks.")
@click.option("--microbatches", type=PositiveInt(8), metavar="M", help="Microbatches per step.")
@click.option(
    "--vp", type=PositiveInt(1), metavar="V", help="Stages of each rank (default: what the schedule implies)."
)
@click.option(
    "--costs", default="", metavar="F=1,BI=1,...", help="Costs of passes, in any one unit, kept exact."
)
@click.option(
    "--memory-cap", type=PositiveNumber("4"), metavar="X", help="Most microbatches in flight on a rank."
)
@click.option("--check", is_flag=True, help="Check the rows; exit code 4 with the violations.")
@click.option("--csv", metavar="F.csv", help="Write the order in torch's pipelining format.")
@click.option(
    "--csv-form",
    type=click.Choice(["passes", "transfers", "table"]),
    default="passes",
    show_default=True,
    help="passes; passes and transfers; or both as lines rank,order,op,stage,microbatch,peer.",
)
@json_option
def schedules(*, name: str | None, as_json: bool, check: bool, **given: Any) -> None:
    """List schedules, or draw one: which pass runs when on each pipeline rank.

    \b
    Examples:
      piper schedules
      piper schedules 1f1b --pp 4 --microbatches 8
      piper schedules gpipe --pp 4 --microbatches 8 --costs F=1,BI=1,BW=1,comm=0.1 --json
      piper schedules my_schedule.py:rows --pp 4 --microbatches 8 --check
      piper schedules interleaved_1f1b --pp 4 --vp 2 --microbatches 8 --csv order.csv
      piper schedules order.csv
    """
    if name is None:
        _list(as_json)
        return
    from piper.schedules import parse_costs
    from piper.schedules.preview import preview_schedule

    counts: dict[str, Any] = _counts(name, given)
    cap = given["memory_cap"]
    limits: dict[str, Any] = {
        "costs": parse_costs(given["costs"]),
        "memory_cap": None if cap is None else Fraction(str(cap)),
    }
    if check:
        _check(name, counts, **limits)
    found = preview_schedule(name, **counts, **limits)
    if given["csv"] is not None:
        _write_csv(found, given["csv"], form=given["csv_form"])
    emit({"schema_version": 1, **found.to_json()}, as_json=as_json, text=lambda: _text(found))


def _list(as_json: bool) -> None:
    from piper.schedules import SCHEDULES

    entries = [
        {"name": name, "description": (module.__doc__ or "").partition("\n")[0]}
        for name, module in SCHEDULES.items()
    ]
    show_list("schedules", entries, columns={"name": "name", "description": "description"}, as_json=as_json)


def _counts(name: str, given: dict[str, Any]) -> dict[str, int]:
    """Return the counts that were given; a schedule file has its own, and a schedule implies --vp."""
    from piper.schedules import ScheduleFile, default_virtual_stages, find_schedule

    function = find_schedule(name, where="schedule")
    pp, microbatches, vp = given["pp"], given["microbatches"], given["vp"]
    if isinstance(function, ScheduleFile):
        pp = function.num_pipeline_ranks if pp is None else pp
        microbatches = function.num_microbatches if microbatches is None else microbatches
    return {
        "num_pipeline_ranks": _required("--pp", pp),
        "num_microbatches": _required("--microbatches", microbatches),
        "virtual_stages_per_rank": default_virtual_stages(name, where="schedule") if vp is None else vp,
    }


def _write_csv(found: Preview, path: str, *, form: str) -> None:
    from piper.schedules import csv_table, csv_torch
    from piper.schedules.entries import entries_of, with_transfers

    entries = (
        entries_of(found.rows)
        if form == "passes"
        else with_transfers(found.rows, stages=found.stages, copies=found.copies)
    )
    text = csv_table.write(entries) if form == "table" else csv_torch.write(entries)
    try:
        Path(path).write_text(text, encoding="utf-8", newline="")
    except (OSError, ValueError) as problem:
        raise InputError(
            where="command line", field="--csv", value=path, rule=f"cannot be written: {problem}",
            fix="give a file in a folder that exists and may be written",
        ) from problem  # fmt: skip


def _required(option: str, value: int | None) -> int:
    if value is None:
        raise InputError(
            where="command line",
            field=option,
            value="(nothing)",
            rule="must be given",
            fix="a schedule alone needs --pp and --microbatches",
        )
    return value


def _check(name: str, counts: dict[str, int], *, costs: Costs, memory_cap: Fraction | None) -> None:
    """Raise IllegalPlanError with every violation of the rows."""
    from piper.schedules import copies_of, find_schedule, stages_of, unchecked_rows
    from piper.schedules.rows import row_violations
    from simulator.errors import IllegalPlanError

    rows = unchecked_rows(name, **counts, costs=costs, memory_cap=memory_cap, where="schedule")
    stages = stages_of(
        name,
        num_pipeline_ranks=counts["num_pipeline_ranks"],
        virtual_stages_per_rank=counts["virtual_stages_per_rank"],
        where="schedule",
    )
    copies = copies_of(find_schedule(name, where="schedule"))
    violations = row_violations(
        rows, stages=stages, num_microbatches=counts["num_microbatches"], copies=copies
    )
    if violations:
        raise IllegalPlanError(where=name, violations=violations)


def _text(found: Preview) -> str:
    from piper.report.quantities import format_share
    from piper.schedules.gantt import draw_gantt

    figures = found.to_json()
    bubble = f"{found.bubble_fraction} = {format_share(float(found.bubble_fraction))}"
    return "\n".join(
        [
            draw_gantt(found, width=terminal_width()),
            f"makespan {figures['makespan']}, bubble {bubble} of it",
            f"in flight on each rank {figures['in_flight']}, at most {figures['peak_in_flight']}",
        ]
    )

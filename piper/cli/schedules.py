"""`piper schedules`: the pipeline schedules by name, or one of them alone, without a model."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import click

from cost_models.errors import InputError
from piper.cli.catalogue import show_list
from piper.cli.options import PositiveInt, PositiveNumber, json_option
from piper.cli.output import emit

if TYPE_CHECKING:
    from piper.schedules import Costs
    from piper.schedules.preview import Preview


@click.command()
@click.argument("name", metavar="[NAME|FILE.py:FUNCTION]", required=False)
@click.option("--pp", type=PositiveInt(4), metavar="P", help="Pipeline ranks.")
@click.option("--microbatches", type=PositiveInt(8), metavar="M", help="Microbatches per step.")
@click.option(
    "--vp", type=PositiveInt(1), default=1, metavar="V", show_default=True, help="Stages of each rank."
)
@click.option(
    "--costs", default="", metavar="F=1,BI=1,...", help="Costs of passes, in any one unit, kept exact."
)
@click.option(
    "--memory-cap", type=PositiveNumber("4"), metavar="X", help="Most microbatches in flight on a rank."
)
@click.option("--check", is_flag=True, help="Check the rows; exit code 4 with the violations.")
@json_option
def schedules(*, name: str | None, as_json: bool, check: bool, **given: Any) -> None:
    """List schedules, or draw one: which pass runs when on each pipeline rank.

    \b
    Examples:
      piper schedules
      piper schedules 1f1b --pp 4 --microbatches 8
      piper schedules gpipe --pp 4 --microbatches 8 --costs F=1,BI=1,BW=1,comm=0.1 --json
      piper schedules my_schedule.py:rows --pp 4 --microbatches 8 --check
    """
    if name is None:
        _list(as_json)
        return
    from piper.schedules import parse_costs
    from piper.schedules.preview import preview_schedule

    counts = {
        "num_pipeline_ranks": _required("--pp", given["pp"]),
        "num_microbatches": _required("--microbatches", given["microbatches"]),
        "virtual_stages_per_rank": given["vp"],
    }
    cap = given["memory_cap"]
    limits: dict[str, Any] = {
        "costs": parse_costs(given["costs"]),
        "memory_cap": None if cap is None else Fraction(str(cap)),
    }
    if check:
        _check(name, counts, **limits)
    found = preview_schedule(name, **counts, **limits)
    emit({"schema_version": 1, **found.to_json()}, as_json=as_json, text=lambda: _text(found))


def _list(as_json: bool) -> None:
    from piper.schedules import SCHEDULES

    entries = [
        {"name": name, "description": (module.__doc__ or "").partition("\n")[0]}
        for name, module in SCHEDULES.items()
    ]
    show_list("schedules", entries, columns={"name": "name", "description": "description"}, as_json=as_json)


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
    from piper.schedules import stages_of, unchecked_rows
    from piper.schedules.rows import row_violations
    from simulator.errors import IllegalPlanError

    rows = unchecked_rows(name, **counts, costs=costs, memory_cap=memory_cap, where="schedule")
    stages = stages_of(
        name,
        num_pipeline_ranks=counts["num_pipeline_ranks"],
        virtual_stages_per_rank=counts["virtual_stages_per_rank"],
        where="schedule",
    )
    violations = row_violations(rows, stages=stages, num_microbatches=counts["num_microbatches"])
    if violations:
        raise IllegalPlanError(where=name, violations=violations)


def _text(found: Preview) -> str:
    from piper.report.quantities import format_share
    from piper.schedules.gantt import draw_gantt

    figures = found.to_json()
    bubble = f"{found.bubble_fraction} = {format_share(float(found.bubble_fraction))}"
    return "\n".join(
        [
            draw_gantt(found),
            f"makespan {figures['makespan']}, bubble {bubble} of it",
            f"in flight on each rank {figures['in_flight']}, at most {figures['peak_in_flight']}",
        ]
    )

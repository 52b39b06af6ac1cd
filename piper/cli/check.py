"""`piper check`: static checks of a strategy, a plan or a schedule file; nothing is simulated or run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from cost_models.errors import InputError, nearest
from piper.cli.jobs import plan_of
from piper.cli.options import job_options, json_option, strategy_option
from piper.cli.output import emit, progress
from piper.errors import DoesNotFitError

if TYPE_CHECKING:
    from simulator.plan import Plan


@click.command()
@click.argument("target", metavar="MODEL|PLAN|SCHEDULE.csv")
@strategy_option
@job_options
@click.option(
    "--require-fit", is_flag=True, help="Exit with code 3 when a rank surely needs more memory than it has."
)
@click.option(
    "--dump-after", metavar="PASS", help="Print the graph as it is after a pass (or a directive), too."
)
@json_option
def check(
    *, target: str, strategy: str, require_fit: bool, dump_after: str | None, as_json: bool, **job: Any
) -> None:
    """Look for cycles, circular waits, lost work and buffers used after they are freed.

    Exit code 4, with every violation listed, when the plan is illegal. A schedule file is checked alone:
    passes lost or done twice, and circular waits where it lists transfers. Memory that can never
    fit, whatever the durations, is a warning.

    \b
    Examples:
      piper check llama3-8b --gpus 8 --strategy pp=4,dp=2
      piper check plan.json.gz
      piper check llama3-8b --strategy my_strategy.json --json
      piper check tiny-llama --gpus 2 --strategy pp=2 --dump-after insert_transfers
      piper check order.csv
    """
    from piper.schedules.schedule_file import is_schedule_file

    if is_schedule_file(target):
        stated = {"strategy": strategy or None, "require_fit": require_fit, "dump_after": dump_after} | job
        _check_schedule(target, stated=stated, as_json=as_json)
        return
    from simulator.errors import IllegalPlanError
    from simulator.plan.check import check_plan

    graphs: dict[str, str] = {}
    with progress(f"checking {target}"):
        plan = plan_of(target, strategy, job=job, on_pass=graphs.__setitem__ if dump_after else None)
        graph = None if dump_after is None else _graph_after(dump_after, graphs, target)
        violations: Sequence[object] = check_plan(plan)
    if violations:
        raise IllegalPlanError(
            where=strategy or target, violations=[str(violation) for violation in violations]
        )
    warnings = _never_fits(plan, job)
    if warnings and require_fit:
        raise DoesNotFitError(
            where=strategy or target, field="memory", value=warnings[0], rule="can never fit",
            fix="shard or recompute more, use more devices, or leave out --require-fit",
        )  # fmt: skip
    tasks = sum(len(device.tasks) for device in plan.device_plans)
    found = {
        "schema_version": 1,
        "legal": True,
        "violations": [],
        "warnings": warnings,
        "n_ranks": plan.num_ranks,
        "n_tasks": tasks,
        "notices": list(plan.notices),
    }
    found |= {} if graph is None else {"graph": graph}
    text = f"legal: {tasks} tasks on {plan.num_pipeline_ranks} pipeline ranks x {plan.replicas} replicas"
    text = text if graph is None else f"{graph}\n{text}"
    notices = [f"warning: {warning}" for warning in warnings]
    notices += [f"notice: {notice}" for notice in plan.notices]
    emit(found, as_json=as_json, text=lambda: "\n".join([text, *notices]))


def _graph_after(name: str, graphs: dict[str, str], target: str) -> str:
    """Return the text of the graph after a pass, or after the last directive of a name."""
    if not graphs:
        raise InputError(
            where="command line", field="--dump-after", value=name,
            rule=f"means nothing for {target}, which is compiled already",
            fix="leave it out, or give the model instead of the plan",
        )  # fmt: skip
    if name not in graphs:
        raise InputError(
            where="command line", field="--dump-after", value=name,
            rule="is not a pass, nor a directive of this strategy",
            fix=f"there are {', '.join(graphs)}: {nearest(name, tuple(graphs))}",
        )  # fmt: skip
    return graphs[name]


def _never_fits(plan: Plan, job: dict[str, Any]) -> list[str]:
    """Say which device needs the most, if even the least that it holds at some moment is too much."""
    from piper.predict import Job, load_hardware
    from simulator.plan.check import least_memory_bytes

    stated = {name: job.get(name) or getattr(Job(model=""), name) for name in ("cluster", "stack")}
    _, cost_model = load_hardware(**stated)
    least = least_memory_bytes(plan)
    rank = max(range(len(least)), key=lambda number: least[number])
    needed, have = least[rank] + cost_model.context_bytes, cost_model.device_memory_bytes
    if needed <= have:
        return []
    return [
        f"pipeline rank {rank} needs at least {needed / 2**30:.1f} GiB at some moment (driver context "
        f"included), whatever the durations; {have / 2**30:.1f} GiB are usable per device"
    ]


def _check_schedule(path: str, *, stated: dict[str, Any], as_json: bool) -> None:
    """Check a schedule file without a model; options of a job are refused, not ignored."""
    from piper.schedules.file_check import file_violations
    from piper.schedules.schedule_file import load_schedule_file
    from simulator.errors import IllegalPlanError

    for name, value in stated.items():
        if value not in (None, False, ()):
            option = "set" if name == "settings" else name.replace("_", "-")
            raise InputError(
                where="command line", field=f"--{option}", value=value,
                rule=f"means nothing for {path}, a schedule without a model",
                fix="leave it out, or give a model and schedule=FILE.csv in its --strategy",
            )  # fmt: skip
    file = load_schedule_file(path, field="file", where="check")
    violations = file_violations(file)
    if violations:
        raise IllegalPlanError(where=path, violations=violations)
    tasks = sum(len(entry.passes) + len(entry.transfers) for row in file.entries for entry in row)
    notices = ["an excerpt: no microbatch 0 runs forward, so nothing counts as missing"]
    found = {
        "schema_version": 1,
        "legal": True,
        "violations": [],
        "n_ranks": file.num_pipeline_ranks,
        "n_tasks": tasks,
        "notices": notices if file.is_excerpt else [],
    }
    text = f"legal: {tasks} tasks on {file.num_pipeline_ranks} pipeline ranks"
    shown = [f"notice: {notice}" for notice in notices if file.is_excerpt]
    emit(found, as_json=as_json, text=lambda: "\n".join([text, *shown]))

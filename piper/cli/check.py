"""`piper check`: static checks of a strategy, a plan or a schedule file; nothing is simulated or run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from cost_models.errors import InputError
from piper.cli.jobs import plan_of
from piper.cli.options import job_options, json_option, strategy_option
from piper.cli.output import emit, progress


@click.command()
@click.argument("target", metavar="MODEL|PLAN|SCHEDULE.csv")
@strategy_option
@job_options
@json_option
def check(target: str, strategy: str, as_json: bool, **job: Any) -> None:
    """Look for cycles, circular waits, lost work and buffers used after they are freed.

    Exit code 4, with every violation listed, when the plan is illegal. A schedule file is checked alone:
    passes lost or done twice, and circular waits where it lists transfers.

    \b
    Examples:
      piper check llama3-8b --gpus 8 --strategy pp=4,dp=2
      piper check plan.json.gz
      piper check llama3-8b --strategy my_strategy.json --json
      piper check order.csv
    """
    from piper.schedules.schedule_file import is_schedule_file

    if is_schedule_file(target):
        _check_schedule(target, stated={"strategy": strategy or None} | job, as_json=as_json)
        return
    from simulator.errors import IllegalPlanError
    from simulator.plan.check import check_plan

    with progress(f"checking {target}"):
        plan = plan_of(target, strategy, job=job)
        violations: Sequence[object] = check_plan(plan)
    if violations:
        raise IllegalPlanError(
            where=strategy or target, violations=[str(violation) for violation in violations]
        )
    tasks = sum(len(device.tasks) for device in plan.device_plans)
    found = {
        "schema_version": 1,
        "legal": True,
        "violations": [],
        "n_ranks": plan.num_ranks,
        "n_tasks": tasks,
        "notices": list(plan.notices),
    }
    text = f"legal: {tasks} tasks on {plan.num_pipeline_ranks} pipeline ranks x {plan.replicas} replicas"
    notices = [f"notice: {notice}" for notice in plan.notices]
    emit(found, as_json=as_json, text=lambda: "\n".join([text, *notices]))


def _check_schedule(path: str, *, stated: dict[str, Any], as_json: bool) -> None:
    """Check a schedule file without a model; options of a job are refused, not ignored."""
    from piper.schedules.file_check import file_violations
    from piper.schedules.schedule_file import load_schedule_file
    from simulator.errors import IllegalPlanError

    for name, value in stated.items():
        if value not in {None, False}:
            raise InputError(
                where="command line", field=f"--{name.replace('_', '-')}", value=value,
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

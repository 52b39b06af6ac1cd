"""`piper check`: static checks of a strategy or a plan; nothing is simulated or run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from piper.cli.jobs import plan_of
from piper.cli.options import job_options, json_option, strategy_option
from piper.cli.output import emit, progress


@click.command()
@click.argument("target", metavar="MODEL|PLAN")
@strategy_option
@job_options
@json_option
def check(target: str, strategy: str, as_json: bool, **job: Any) -> None:
    """Look for cycles, circular waits, lost work and buffers used after they are freed.

    Exit code 4, with every violation listed, when the plan is illegal.

    \b
    Examples:
      piper check llama3-8b --gpus 8 --strategy pp=4,dp=2
      piper check plan.json.gz
      piper check llama3-8b --strategy my_strategy.json --json
    """
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

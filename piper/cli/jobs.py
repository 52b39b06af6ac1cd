"""From the arguments of a command to a plan or a prediction: MODEL or PLAN, strategy, job options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cost_models.documents import UnreadableError, is_file, read_head
from cost_models.errors import InputError, InternalError
from piper.report.result import Result
from simulator.plan import Plan

if TYPE_CHECKING:
    from piper.predict import Job

_PLAN_MARK = b'"piper-plan"'
_MARK_WITHIN_BYTES = 200
_FIXED_IN_A_PLAN = ("gpus", "seq_len", "global_batch", "micro_batch", "dtype", "optimizer", "clip_grad_norm",
                    "recipe", "settings")  # fmt: skip


def job_of(model: str, strategy: str, given: dict[str, Any]) -> Job:
    """Gather a job; what was not given is left to the defaults of `Job`."""
    from piper.predict import Job
    from piper.strategy import load_strategy

    stated = {name: value for name, value in given.items() if value not in (None, ())}
    if stated.get("clip_grad_norm") == 0:
        stated["clip_grad_norm"] = None
    return Job(model=model, strategy=load_strategy(strategy), **stated)


def predict_target(target: str, strategy: str, *, job: dict[str, Any], **options: Any) -> tuple[Plan, Result]:
    """Simulate a model with a strategy, or a plan file; `options`: steps, engine, jitter of `predict`."""
    from piper.predict import predict

    if is_plan_file(target):
        return _predict_plan(target, strategy, job=job, **options)
    found = predict(job_of(target, strategy, job), **options)
    if found.compiled is None:
        raise InternalError("internal error: a prediction of a job has no plan")
    name, plan = found.result["strategy"]["shorthand"], found.compiled.plan
    return plan, Result(name=name, summary=found.result, timeline=found.timeline, plan=plan)


def plan_of(
    target: str, strategy: str, *, job: dict[str, Any], on_pass: Callable[[str, str], None] | None = None
) -> Plan:
    """Compile a model with a strategy, or read a plan file; `on_pass`: see `compile_graph`."""
    from piper.predict import compile_job

    if is_plan_file(target):
        return _read_plan(target, strategy, job)
    return compile_job(job_of(target, strategy, job), on_pass=on_pass).plan


def is_plan_file(target: str) -> bool:
    """Tell whether the file says that it is a plan; what it holds is judged when it is read."""
    path = Path(target)
    try:
        return is_file(path) and _PLAN_MARK in read_head(path, _MARK_WITHIN_BYTES)
    except UnreadableError:
        return False


def require_tokens(tokens: int | None, price: str | None) -> None:
    """Refuse a price of a run whose length is not known."""
    if price is not None and tokens is None:
        raise InputError(
            where="command line", field="--price", value=price, rule="needs --tokens",
            fix="say on how many tokens to train, such as --tokens 1000000000000",
        )  # fmt: skip


def whole_run(
    summary: Mapping[str, Any], tokens: int, *, price: str | None, cluster: str | None
) -> dict[str, Any]:
    """Return what training on so many tokens takes, by the figures of a result."""
    from cost_models import load_cluster
    from piper.report.budget import budget, price_of

    gpu = load_cluster(cluster or str(summary["cluster"])).gpu.name
    return budget(
        tokens,
        step_time_s=summary["step_time_s"],
        tokens_per_s=summary["tokens_per_s"],
        n_gpus=summary["n_gpus"],
        price=None if price is None else price_of(price, gpu=gpu),
    )


def _predict_plan(target: str, strategy: str, *, job: dict[str, Any], **options: Any) -> tuple[Plan, Result]:
    from piper.predict import predict_plan
    from simulator.errors import IllegalPlanError
    from simulator.plan.check import check_plan

    plan = _read_plan(target, strategy, job)
    violations = check_plan(plan)
    if violations:  # a file can be edited, and figures of a plan that loses work would mislead
        raise IllegalPlanError(where=target, violations=[str(violation) for violation in violations])
    hardware = {
        name: job[name] for name in ("cluster", "stack", "mfu_convention") if job.get(name) is not None
    }
    changes = tuple(entry for entry in job.get("settings") or () if _is_of_hardware(entry))
    found = predict_plan(plan, settings=changes, **options, **hardware)
    return plan, Result(name=target, summary=found.result, timeline=found.timeline, plan=plan)


def _read_plan(target: str, strategy: str, job: dict[str, Any]) -> Plan:
    """Read a plan file; options that the plan has decided already are refused, not ignored."""
    from simulator.plan.codec import load_plan

    stated = {"strategy": strategy or None} | {name: job.get(name) for name in _FIXED_IN_A_PLAN}
    stated["settings"] = tuple(entry for entry in job.get("settings") or () if not _is_of_hardware(entry))
    for name, value in stated.items():
        if value not in (None, ()):
            raise InputError(
                where="command line",
                field="--set" if name == "settings" else f"--{name.replace('_', '-')}",
                value=value,
                rule=f"cannot change {target}, which is compiled already",
                fix="leave it out, or give the model instead of the plan",
            )
    return load_plan(target)


def _is_of_hardware(setting: tuple[str, str]) -> bool:
    """Tell whether a `--set` changes what a plan meets, not the plan."""
    return setting[0].startswith("cost.")

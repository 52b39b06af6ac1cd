"""`piper run`: train with the very plan that `piper simulate` predicts."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from piper.cli.failures import RunDiffersError
from piper.cli.jobs import job_of
from piper.cli.options import (
    PositiveInt,
    PositiveNumber,
    WholeNumber,
    job_options,
    json_option,
    strategy_option,
)
from piper.cli.output import emit, prepared, progress
from piper.errors import JobError, RunFailedError
from piper.report.result import Result

if TYPE_CHECKING:
    from piper.predict import CompiledJob
    from piper.runtime import RunOutcome

_THIS_MACHINE = "local-cpu"


@click.command()
@click.argument("model", metavar="MODEL")
@strategy_option
@click.option(
    "--local", type=PositiveInt(4), metavar="N", help="Start N CPU processes here (else: torchrun)."
)
@click.option(
    "--device",
    metavar="cpu|cuda",
    help="What ranks under torchrun run on (default: a GPU if there is one).",
)
@click.option("--steps", type=PositiveInt(3), default=3, show_default=True, help="Optimizer steps.")
@click.option(
    "--seed", type=WholeNumber(0), default=0, show_default=True, help="Of values, data and dropout."
)
@click.option(
    "--verify", is_flag=True, help="Compare every step with one process; exit code 5 if it differs."
)
@click.option(
    "--reductions", metavar="native|ordered", help="How sums are made (default: native; --verify: ordered)."
)
@click.option(
    "--timeout", type=PositiveNumber("600"), default=600.0, metavar="S", help="Longest silence of a rank."
)
@click.option(
    "--padding",
    type=float,
    default=0.0,
    metavar="P",
    help="Share of the tokens, up to 0.5, that are padding; the loss leaves it out.",
)
@click.option("--no-recording", is_flag=True, help="Do not measure single tasks: no --trace, no --out.")
@job_options
@click.option("--trace", metavar="F.json[.gz]", help="Write what was measured as a Chrome trace.")
@click.option("--out", metavar="DIR", help="Write result.json, timeline.npz and plan.json.gz there.")
@json_option
def run(*, model: str, strategy: str, as_json: bool, **given: Any) -> None:
    """Train on seeded random tokens: N processes on this machine, or one rank under torchrun.

    Prints the measured steps and what was predicted for them. Ctrl-C (with --local) ends the run after the
    step under way, keeps what was measured, and exits with 130; a second Ctrl-C ends it at once.

    \b
    Examples:
      piper run tiny-llama --local 4 --strategy pp=2,dp=2 --steps 3 --verify
      piper run tiny-llama --local 4 --strategy pp=4,schedule=gpipe --trace run.json
      torchrun --nproc-per-node 4 -m piper run tiny-llama --strategy pp=2,dp=2 --steps 10
    """
    settings = {name: given.pop(name) for name in ("steps", "seed", "verify", "reductions", "padding")}
    settings["timeout_s"] = given.pop("timeout")
    settings["device"] = given.pop("device")
    files = {name: given.pop(name) for name in ("trace", "out")}
    settings["record"] = not given.pop("no_recording")
    _require_recording(files, record=settings["record"])
    world_size = _world_size(given.pop("local"), given)
    with progress(f"training {model}"):
        compiled = _compile(model, strategy, world_size=world_size, given=given)
        outcome = _train(compiled, settings)
    if outcome is None:
        return
    result = outcome.result | {"predicted_step_time_s": _predicted_s(compiled)}
    outcome = replace(outcome, result=result)
    written = _write(files, compiled, outcome)
    if result["verified"] is not False:
        emit(
            result,
            as_json=as_json,
            text=lambda: "\n".join([_text(model, result), *_crowded(result), *written]),
        )
        if result["interrupted"]:
            raise KeyboardInterrupt
        return
    if not as_json:
        emit(result, as_json=False, text=lambda: _text(model, result))
    raise RunDiffersError(_difference(outcome), result=result)


def _require_recording(files: dict[str, str | None], *, record: bool) -> None:
    for name, path in files.items():
        if path and not record:
            raise JobError(
                where="command line",
                field=f"--{name}",
                value=path,
                rule="needs the times that --no-recording does not measure",
                fix="leave one of the two out",
            )


def _world_size(local: int | None, given: dict[str, Any]) -> int:
    """Return the number of ranks: of `--local`, else of torchrun."""
    if local is None and "RANK" not in os.environ:
        raise JobError(
            where="command line",
            field="--local",
            value="(nothing)",
            rule="must be given",
            fix="give --local N to start N CPU processes, or start every rank with torchrun",
        )
    size = local if local is not None else int(os.environ.get("WORLD_SIZE", "1"))
    if given["gpus"] not in {None, size}:
        raise JobError(
            where="command line",
            field="--gpus",
            value=given["gpus"],
            rule=f"contradicts the {size} processes of " + ("--local" if local is not None else "torchrun"),
            fix="leave --gpus out",
        )
    return size


def _compile(model: str, strategy: str, *, world_size: int, given: dict[str, Any]) -> CompiledJob:
    from piper.predict import compile_job

    defaults = {"cluster": _THIS_MACHINE, "dtype": "fp32"}
    stated = {name: value for name, value in given.items() if value is not None}
    return compile_job(job_of(model, strategy, defaults | stated | {"gpus": world_size}))


def _train(compiled: CompiledJob, settings: dict[str, Any]) -> RunOutcome | None:
    """Run; under torchrun only rank 0 has an outcome."""
    from piper.runtime import run_local, run_rank

    if "RANK" in os.environ:
        return run_rank(compiled.plan, compiled.source, **settings)
    _require_cpu(settings.pop("device"))
    return run_local(compiled.plan, compiled.source, num_ranks=compiled.plan.num_ranks, **settings)


def _require_cpu(device: str | None) -> None:
    """Raise JobError for processes of --local that should not run on the CPU."""
    if device not in {None, "cpu"}:
        raise JobError(
            where="command line",
            field="--device",
            value=device,
            rule="cannot go with --local, which starts CPU processes",
            fix="leave --local out and start one process per GPU with torchrun",
        )


def _predicted_s(compiled: CompiledJob) -> float:
    from piper.predict import predict_plan

    job = compiled.job
    cores = os.cpu_count() if job.cluster == _THIS_MACHINE else None
    found = predict_plan(
        compiled.plan, cluster=job.cluster, stack=job.stack, settings=job.settings, cores=cores
    )
    return float(found.result["step_time_s"])


def _write(files: dict[str, str | None], compiled: CompiledJob, outcome: RunOutcome) -> list[str]:
    written = []
    if files["trace"]:
        from simulator.timeline.chrome import write_chrome_trace

        path = prepared(files["trace"], option="--trace")
        write_chrome_trace(outcome.timeline, path, plan=compiled.plan)
        written.append(f"wrote {path}")
    if files["out"]:
        plan, timeline = compiled.plan, outcome.timeline
        found = Result(name=plan.strategy, summary=outcome.result, timeline=timeline, plan=plan)
        written.append(f"wrote {found.save(files['out'])}")
    return written


def _text(model: str, result: dict[str, Any]) -> str:
    from piper.report.training import describe_run

    return describe_run(model, result)


def _crowded(result: dict[str, Any]) -> list[str]:
    """Say that processes shared cores, which is measured rather than estimated by a profile."""
    cores, processes = os.cpu_count() or 1, result["world_size"]
    if result["device"] != "cpu" or processes <= cores:
        return []
    return [f"note: {processes} processes share {cores} cores; piper profile measures what that costs here"]


def _difference(outcome: RunOutcome) -> str:
    """Return the words in which the runtime says what differs."""
    from piper.runtime import require_verified

    try:
        require_verified(outcome)
    except RunFailedError as error:
        return str(error)
    return "the run differs from one process"

"""`piper simulate`: time, memory and breakdown of one strategy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from cost_models.errors import InputError
from piper.cli.failures import ResultDoesNotFitError
from piper.cli.jobs import predict_target, require_tokens, whole_run
from piper.cli.options import (
    PositiveInt,
    WholeNumber,
    job_options,
    json_option,
    strategy_option,
    whole_run_options,
)
from piper.cli.output import emit, prepared, prepared_folder, prepared_picture, progress
from piper.report.result import Result
from simulator.plan import Plan


@click.command()
@click.argument("target", metavar="MODEL|PLAN")
@strategy_option
@job_options
@click.option(
    "--engine",
    metavar="auto|fast|reference",
    default="auto",
    help="Simulation engine; the answer is the same.",
)
@click.option(
    "--steps", type=PositiveInt(2), help="Steps to simulate (default: 2 to 4, until the step time settles)."
)
@click.option(
    "--jitter",
    metavar="SPEC",
    multiple=True,
    help="How ranks differ from the plan, such as straggler:rank=17,factor=1.3 or noise:sigma=0.05; "
    "repeatable, or separated by ; (docs/jitter.md).",
)
@click.option("--seed", type=WholeNumber(1), help="Seed of the first run with jitter (default: 0).")
@click.option(
    "--runs", type=PositiveInt(32), help="Runs with jitter, each with the next seed (default: up to 20)."
)
@whole_run_options
@click.option(
    "--require-fit", is_flag=True, help="Exit with code 3 when a rank needs more memory than it has."
)
@click.option("--out", metavar="DIR", help="Write result.json, timeline.npz and plan.json.gz there.")
@click.option("--trace", metavar="F.json[.gz]", help="Write a Chrome trace (open it in Perfetto).")
@click.option("--plot", metavar="F.png|svg", help="Draw the timeline.")
@click.option(
    "--jitter-plot", metavar="F.png|svg", help="Draw the step times with jitter, and whom others wait for."
)
@click.option("--memory-plot", metavar="F.png|svg", help="Draw memory over time.")
@click.option("--plan-out", metavar="F.json[.gz]", help="Write the compiled plan.")
@json_option
def simulate(
    *,
    target: str,
    strategy: str,
    engine: str,
    steps: int | None,
    jitter: tuple[str, ...],
    seed: int | None,
    runs: int | None,
    require_fit: bool,
    tokens: int | None,
    price: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Predict time and memory of one training step.

    MODEL is a name of `piper models`, a config.json (file or folder), or package.module:factory.
    PLAN is a file that --plan-out wrote.

    \b
    Examples:
      piper simulate llama3-8b
      piper simulate llama3-8b --gpus 64 --strategy pp=4,dp=16,zero=1,recompute=full --global-batch 512
      piper simulate llama3-8b --gpus 64 --strategy pp=4,dp=16 --jitter "straggler:rank=17,factor=1.3"
      piper simulate examples/llama3-8b/config.json --strategy pp=2,dp=4 --trace trace.json --plot t.png
    """
    files = {name: given.pop(name) for name in ("out", *_PREPARE)}
    targets = _targets({name: path for name, path in files.items() if path is not None})
    require_tokens(tokens, price)
    _require_jitter(jitter, seed=seed, runs=runs, jitter_plot=files["jitter_plot"])
    with progress(f"simulating {target}") as show:
        from piper.predict import Jitter

        asked = Jitter(spec=jitter, seed=seed or 0, runs=runs, report=show) if jitter else None
        plan, result = predict_target(
            target, strategy, job=given, steps=steps or "auto", engine=engine, jitter=asked
        )
        if tokens is not None:
            run = whole_run(result.summary, tokens, price=price, cluster=given["cluster"])
            result = replace(result, summary={**result.summary, "run": run})
        written = _write(targets, plan, result)
    if as_json and require_fit and not result.summary["fits"]:
        raise ResultDoesNotFitError(dict(result.summary))
    emit(result.summary, as_json=as_json, text=lambda: "\n".join([str(result), *_notes(written)]))
    if require_fit and not result.summary["fits"]:
        raise ResultDoesNotFitError(dict(result.summary))


_PREPARE = {
    "trace": prepared,
    "plot": prepared_picture,
    "memory_plot": prepared_picture,
    "jitter_plot": prepared_picture,
    "plan_out": prepared,
}


def _require_jitter(jitter: tuple[str, ...], **options: object) -> None:
    """Refuse options that say something about jitter where there is none."""
    for name, value in options.items():
        if value is not None and not jitter:
            raise InputError(
                where="command line",
                field=f"--{name.replace('_', '-')}",
                value=value,
                rule="needs --jitter",
                fix="add for example --jitter noise:sigma=0.05, or leave it out",
            )


def _targets(files: dict[str, str]) -> dict[str, Path]:
    """Return where to write what was asked for; raises JobError, before the work, for what cannot be."""
    prepare = _PREPARE | {"out": prepared_folder}
    return {name: prepare[name](path, option=f"--{name.replace('_', '-')}") for name, path in files.items()}


def _write(targets: dict[str, Path], plan: Plan, result: Result) -> list[Path]:
    """Write what was asked for; return the paths."""
    if "out" in targets:
        result.save(targets["out"])
    if "trace" in targets:
        from simulator.timeline.chrome import write_chrome_trace

        write_chrome_trace(result.timeline, targets["trace"], plan=plan)
    if "plot" in targets:
        result.plot(targets["plot"])
    if "memory_plot" in targets:
        result.plot_memory(targets["memory_plot"])
    if "jitter_plot" in targets:
        from piper.report.jitter_plot import plot_jitter

        plot_jitter(result.summary["jitter"], targets["jitter_plot"])
    if "plan_out" in targets:
        from simulator.plan.codec import save_plan

        save_plan(plan, targets["plan_out"])
    return list(targets.values())


def _notes(written: list[Path]) -> list[str]:
    return ["", *(f"wrote {path}" for path in written)] if written else []

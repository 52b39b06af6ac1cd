"""`piper compare`: several strategies of one model side by side."""

from __future__ import annotations

from typing import Any

import click

from cost_models.errors import InputError
from piper.cli.jobs import predict_target
from piper.cli.options import job_options, json_option
from piper.cli.output import emit, progress


@click.command()
@click.argument("model", metavar="MODEL")
@click.option(
    "--strategy",
    "strategies",
    metavar="FILE|SHORTHAND",
    multiple=True,
    help="Give it once per strategy.",
)
@job_options
@json_option
def compare(model: str, strategies: tuple[str, ...], as_json: bool, **job: Any) -> None:
    """Predict several strategies and show them side by side.

    \b
    Examples:
      piper compare llama3-8b --gpus 8 --strategy dp=8 --strategy pp=2,dp=4 --strategy pp=4,dp=2
      piper compare llama3-8b --gpus 64 --global-batch 512 --strategy a.json --strategy b.json --json
    """
    if not strategies:
        raise InputError(
            where="command line",
            field="--strategy",
            value="(nothing)",
            rule="must be given",
            fix="give it once per strategy: --strategy dp=8 --strategy pp=2,dp=4",
        )
    found = []
    for strategy in strategies:
        with progress(f"simulating {strategy}"):
            found.append((strategy, predict_target(model, strategy, job=job)[1].summary))
    results = {"schema_version": 1, "results": [summary for _, summary in found]}
    emit(results, as_json=as_json, text=lambda: _text(found))


def _text(found: list[tuple[str, Any]]) -> str:
    from piper.report import summary

    first = found[0][1]
    assumed = summary.common_assumptions([result for _, result in found])
    shared = [t for t in first["warnings"] if all(t in result["warnings"] for _, result in found)]
    warnings = [f"warning: {text}" for text in shared]
    warnings += [f"{s}: warning: {t}" for s, r in found for t in r["warnings"] if t not in shared]
    lines = [summary.heading_lines(first)[0], *summary.assumption_lines(assumed), "", summary.compare(found)]
    return "\n".join([*lines, *([""] if warnings else []), *warnings])

"""`piper export`: a result in the file format of another tool."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cost_models.documents import UnreadableError, is_file, is_folder, read_head
from cost_models.errors import InputError
from piper.cli.jobs import predict_target
from piper.cli.options import WholeNumber, job_options, json_option, strategy_option
from piper.cli.output import emit, prepared, progress

if TYPE_CHECKING:
    from piper.interop import Export
    from piper.report.result import Result

_TRACE_MARK = b'"traceEvents"'
_MARK_WITHIN_BYTES = 200


@click.command()
@click.argument("kind", metavar="KIND")
@click.argument("source", metavar="RESULT|MODEL|PLAN")
@click.option("-o", "--output", metavar="F", required=True, help="File to write.")
@click.option(
    "--rank",
    type=WholeNumber(0),
    help="Only this rank of the job (default: memory-snapshot: the one with the highest peak; chrome: all).",
)
@strategy_option
@job_options
@json_option
def export(
    *,
    kind: str,
    source: str,
    output: str,
    rank: int | None,
    strategy: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Write what a simulation found in the format of another tool.

    \b
    KIND is one of
      memory-snapshot  a PyTorch memory snapshot: drop it on https://pytorch.org/memory_viz
      chrome           a Chrome trace (.json or .json.gz): open it in https://ui.perfetto.dev
    RESULT is a folder that --out wrote. A MODEL or PLAN is simulated first, with the
    options of `piper simulate`.

    \b
    Examples:
      piper export memory-snapshot out/best -o memory.pickle
      piper export memory-snapshot llama3-8b --strategy pp=4,dp=2 --rank 0 -o memory.pickle
      piper export chrome out/best -o trace.json.gz
    """
    from piper.interop import export_of

    chosen = export_of(kind)
    path = prepared(output, option="--output")
    with progress(f"exporting {source}"):
        result = _found(source, strategy, given, needs_plan=chosen.needs_plan)
        note = _written(chosen, result, path=path, rank=rank)
    emit(
        {"schema_version": 1, "kind": kind, "file": str(path), "note": note},
        as_json=as_json,
        text=lambda: f"wrote {path}: {note}",
    )


def _found(source: str, strategy: str, given: dict[str, Any], *, needs_plan: bool) -> Result:
    """Read a result with its plan, or simulate what was named."""
    from piper.report.result import load_plan_of_result, load_result, plan_file_of_result

    if not _is_result(source):
        return predict_target(source, strategy, job=given)[1]
    stated = {"strategy": strategy or None} | given
    for name, value in stated.items():
        if value not in (None, ()):
            raise InputError(
                where="command line",
                field="--set" if name == "settings" else f"--{name.replace('_', '-')}",
                value=value,
                rule=f"cannot change {source}, which is simulated already",
                fix="leave it out, or give the model instead of the result",
            )
    result = load_result(source)
    has_plan = plan_file_of_result(source) is not None
    return replace(result, plan=load_plan_of_result(source)) if needs_plan or has_plan else result


def _is_result(source: str) -> bool:
    """Tell a result folder, its result.json or a trace from a plan, a model's config.json, or a name."""
    from piper.report.result import RESULT_FILE

    path = Path(source)
    try:
        if is_folder(path):
            return is_file(path / RESULT_FILE)
        marked = is_file(path) and _TRACE_MARK in read_head(path, _MARK_WITHIN_BYTES)
    except UnreadableError:
        return False
    return path.name == RESULT_FILE or marked


def _written(chosen: Export, result: Result, *, path: Path, rank: int | None) -> str:
    try:
        return chosen.writer()(result, path, rank=rank)
    except OSError as problem:
        raise InputError(
            where="command line",
            field="--output",
            value=str(path),
            rule=f"cannot be written: {problem.strerror}",
            fix="name a file in a folder that you may write to, with room for it",
        ) from problem

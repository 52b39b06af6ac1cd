"""`piper validate`: predict published runs and score them."""

from __future__ import annotations

import csv
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from piper.validation.predictions import RowPrediction

COLUMNS = (
    "case_id", "predicted_step_time_s", "measured_step_time_s", "ape", "predicted_memory_bytes",
    "measured_memory_bytes", "predicted_fits", "oom", "stack", "reason_skipped",
)  # fmt: skip
_SHOWN = ("mape", "median_ape", "p90_ape", "bias", "memory_mape", "band_coverage")


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="CSV...")
@click.option(
    "--parameters", type=click.Choice(["shipped", "swapped"]), default="shipped",
    help="Shipped: fitted on all rows. Swapped: each half by the fit on the other.",
)  # fmt: skip
@click.option("--stack", default="auto", help="auto (by framework and date), a name, or a file.")
@click.option("--rows", "rows_file", metavar="F.csv", help="Write a line per run.")
@click.option(
    "--report", "report_file", metavar="F.html", help="Write a page with a scatter plot per source."
)
@click.option("--jobs", type=click.IntRange(min=1), help="Processes; all cores when left out.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def validate(  # noqa: PLR0917 (options are given by name)
    files: tuple[str, ...],
    parameters: str,
    stack: str,
    rows_file: str | None,
    report_file: str | None,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Predict published runs and score the predictions, by source.

    A file has a row per run: model, shape, GPU, degrees, and what was measured (docs/accuracy.md).

    \b
    Examples:
      piper validate runs.csv
      piper validate runs.csv --rows predicted.csv --report page.html
    """
    from piper.validation.halves import predict_halves
    from piper.validation.predictions import predict_rows
    from piper.validation.rows import read_rows
    from piper.validation.scores import scores

    began_s = time.perf_counter()
    rows = read_rows(files)
    read_s = time.perf_counter() - began_s
    predict = predict_halves if parameters == "swapped" else predict_rows
    found = predict(rows, stack=stack, jobs=jobs, report=_progress)
    result = scores(found) | {
        "parameters": parameters,
        "timings_s": {"read": read_s, "predict": time.perf_counter() - began_s - read_s},
    }
    if rows_file:
        _write_rows(Path(rows_file), found)
    if report_file:
        from piper.validation.report import write_report

        write_report(Path(report_file), found, result)
    if as_json:
        click.echo(json.dumps(result))
        return
    _print(result)


def _progress(done: int, of: int) -> None:
    if sys.stderr.isatty() and (done % 10 == 0 or done == of):
        end = "\n" if done == of else ""
        print(f"\rpredicted {done} of {of} runs", end=end, file=sys.stderr, flush=True)


def _print(result: dict[str, Any]) -> None:
    click.echo(f"{'source':26}{'runs':>6}{'times':>7}" + "".join(f"{name:>14}" for name in _SHOWN))
    for name, listed in [*result["by_source"].items(), ("all", result["overall"])]:
        figures = "".join(
            f"{'-':>14}" if listed[key] is None else f"{100 * listed[key]:13.1f}%" for key in _SHOWN
        )
        click.echo(f"{name:26}{listed['n']:6d}{listed['n_time']:7d}{figures}")
    for entry in result["skipped"]:
        click.echo(f"skipped {entry['count']}: {entry['reason']}")
    listed = ", ".join(f"{entry['field']} ({entry['count']})" for entry in result["assumed"])
    click.echo(f"assumed: {listed or 'nothing'}")


def _write_rows(path: Path, found: list[RowPrediction]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for p in found:
            error = None if p.error is None else abs(p.error)
            figures = (p.predicted_s, p.measured_s, error, p.predicted_bytes, p.measured_bytes)
            writer.writerow([p.row.case_id, *figures, p.fits, p.row.oom, p.stack, p.reason])

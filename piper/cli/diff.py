"""`piper diff`: a prediction against a recorded run."""

from __future__ import annotations

import click

from piper.cli.options import json_option
from piper.cli.output import emit


@click.command()
@click.argument("predicted", metavar="PREDICTED")
@click.argument("measured", metavar="MEASURED")
@json_option
def diff(*, predicted: str, measured: str, as_json: bool) -> None:
    """Compare a simulation and a run of the same plan, per kind of task.

    Both are an --out folder, its result.json, or a trace.

    \b
    Examples:
      piper run tiny-llama --local 2 --strategy pp=2 --steps 6 --out run
      piper simulate run/plan.json.gz --cluster local-cpu --out sim
      piper diff sim run
      piper diff predicted.json measured.json --json
    """
    from piper.report.difference import difference, difference_text
    from piper.report.result import load_result

    found = difference(load_result(predicted), load_result(measured))
    emit(found.to_json(), as_json=as_json, text=lambda: difference_text(found))

"""`piper plot`: the timeline of a result as a picture."""

from __future__ import annotations

import click

from piper.cli.options import json_option
from piper.cli.output import emit, prepared_picture, progress, terminal_width


@click.command()
@click.argument("source", metavar="RESULT")
@click.option(
    "-o", "--output", metavar="F.png|svg", default="timeline.png", show_default=True, help="Picture to write."
)
@click.option("--memory", is_flag=True, help="Draw memory over time instead of tasks.")
@click.option("--text", is_flag=True, help="Print letters, one line per rank, instead of a picture.")
@json_option
def plot(*, source: str, output: str, memory: bool, text: bool, as_json: bool) -> None:
    """Draw the last step of a result. RESULT is an --out folder, its result.json, or a trace.

    \b
    Examples:
      piper plot out/best -o timeline.png
      piper plot trace.json -o timeline.svg
      piper plot out/best --memory -o memory.png
      piper plot out/best --text
    """
    from piper.report.result import load_result

    result = load_result(source)
    if text:
        from simulator.timeline.gantt import text_gantt

        drawn = text_gantt(result.timeline, width=terminal_width())
        emit({"schema_version": 1, "text": drawn}, as_json=as_json, text=lambda: drawn)
        return
    target = prepared_picture(output, option="--output")
    with progress(f"drawing {source}"):
        path = (result.plot_memory if memory else result.plot)(target)
    emit({"schema_version": 1, "file": str(path)}, as_json=as_json, text=lambda: f"wrote {path}")

"""`piper report`: one self-contained HTML page of one or several results."""

from __future__ import annotations

import click

from cost_models.units import format_bytes
from piper.cli.options import json_option
from piper.cli.output import emit, progress, write_text


@click.command()
@click.argument("sources", metavar="RESULT...", nargs=-1, required=True)
@click.option(
    "-o", "--output", metavar="F.html", default="report.html", show_default=True, help="Page to write."
)
@click.option("--title", default="", help="Title of the page (default: the names of the results).")
@json_option
def report(*, sources: tuple[str, ...], output: str, title: str, as_json: bool) -> None:
    """Write one HTML page that opens from disk, with several results side by side.

    RESULT is an --out folder, its result.json, or a trace.

    \b
    Examples:
      piper report out/best -o report.html
      piper report out/gpipe out/1f1b out/run -o compare.html --title "GPipe or 1F1B"
    """
    from piper.report.page import render_page
    from piper.report.result import load_result

    with progress("writing the report"):
        results = [load_result(source) for source in sources]
        page = render_page(results, title=title or ", ".join(result.name for result in results))
        path = write_text(output, page, option="--output")
    emit(
        {"schema_version": 1, "file": str(path), "results": [result.name for result in results]},
        as_json=as_json,
        text=lambda: f"wrote {path} ({format_bytes(len(page.encode()))}); open it in a browser",
    )

"""`piper search`: the fastest strategy that fits, and why the others lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from piper.cli.options import PositiveInt, PositiveNumber, job_options, json_option
from piper.cli.output import emit, progress

if TYPE_CHECKING:
    from piper.search import SearchResult


@click.command()
@click.argument("model", metavar="MODEL")
@job_options
@click.option("--top", type=PositiveInt(10), default=10, show_default=True, help="Strategies in the ranking.")
@click.option("--time-limit", type=PositiveNumber("60"), metavar="S", help="Stop after so many seconds.")
@click.option(
    "--out", metavar="DIR", help="Write ranking.json and a strategy file for each entry of the ranking."
)
@json_option
def search(
    *, model: str, top: int, time_limit: float | None, out: str | None, as_json: bool, **job: Any
) -> None:
    """Enumerate strategies, drop those that cannot fit, simulate the rest, and rank them.

    \b
    Examples:
      piper search llama3-8b --gpus 64 --global-batch 512 --seq-len 8192
      piper search llama3-8b --gpus 8 --top 3 --json
      piper search tiny-llama --gpus 4 --out out/search
    """
    from piper.search import SearchRequest, search_strategies

    stated = {name: value for name, value in job.items() if value is not None}
    request = SearchRequest(model=model, top=top, time_limit_s=time_limit, **stated)
    with progress(f"searching {model}"):
        found = search_strategies(request)
    if out is not None:
        found.save(out)
    emit(found.to_json(), as_json=as_json, text=lambda: _text(found, out))


def _text(found: SearchResult, out: str | None) -> str:
    from piper.report.ranking import describe_search

    return "\n".join([describe_search(found.to_json()), *([f"\nwrote {out}"] if out else [])])

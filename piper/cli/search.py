"""`piper search`: the fastest strategy that fits, and why the others lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from piper.cli.options import KeyValue, PositiveInt, PositiveNumber, job_options, json_option
from piper.cli.output import emit, prepared_folder, progress
from piper.errors import JobError


@click.command()
@click.argument("model", metavar="MODEL")
@job_options
@click.option("--top", type=PositiveInt(10), default=10, show_default=True, help="Strategies in the ranking.")
@click.option(
    "--objective", metavar="time|memory|cost", default="time", show_default=True, help="What to minimise."
)
@click.option("--time-limit", type=PositiveNumber("60"), metavar="S", help="Stop after so many seconds.")
@click.option("--max-candidates", type=PositiveInt(100), metavar="N", help="Simulate at most so many.")
@click.option("--jobs", type=PositiveInt(2), default=1, show_default=True, help="Simulations at once.")
@click.option(
    "--executor",
    metavar="local|ray",
    default="local",
    show_default=True,
    help="Processes of this machine, or a Ray cluster (RAY_ADDRESS; else one is started here).",
)
@click.option("--db", metavar="F.sqlite", help="Keep what is simulated there (default: in --out).")
@click.option("--resume", is_flag=True, help="Go on with what an interrupted search kept.")
@click.option("--pin", type=KeyValue("pp=4"), multiple=True, help="Allow only this value (repeatable).")
@click.option(
    "--forbid", type=KeyValue("recompute=full"), multiple=True, help="Leave this value out (repeatable)."
)
@click.option(
    "--why-not", metavar="k=v,k=v", default="", help="Say how the best strategy with these values loses."
)
@click.option("--out", metavar="DIR", help="Write ranking.json, and a strategy file for each entry.")
@json_option
def search(*, model: str, out: str | None, as_json: bool, **given: Any) -> None:
    """Enumerate strategies, drop those that cannot fit, simulate the promising ones, and rank them.

    Ctrl-C keeps what was found and exits with 130; --resume then gives the answer of a search that was
    never interrupted. So does a search that was killed, up to the last simulation that was done.

    \b
    Examples:
      piper search llama3-8b --gpus 64 --global-batch 512 --seq-len 8192
      piper search llama3-8b --gpus 8 --pin recompute=none --top 3 --json
      piper search llama3-8b --gpus 64 --why-not pp=8 --out out/search
      piper search llama3-8b --gpus 64 --jobs 8 --db search.sqlite --resume
    """
    from piper.report.ranking import describe_search
    from piper.search import SearchRequest, search_strategies

    stated = {name: value for name, value in given.items() if value is not None}
    stated["time_limit_s"] = stated.pop("time_limit", None)
    stated["pin"] = _pinned(stated["pin"])
    stated["why_not"] = _pairs(stated["why_not"])
    if stated.get("clip_grad_norm") == 0:
        stated["clip_grad_norm"] = None
    if out is not None:
        folder = prepared_folder(out, option="--out")
        stated.setdefault("db", str(folder / "search.sqlite"))
    with progress(f"searching {model}") as say:
        found = search_strategies(SearchRequest(model=model, **stated), on_progress=say)
    if out is not None:
        found = _saved(found, out)
    note = f"\n\nwrote {Path(out)}" if out else ""
    emit(found.to_json(), as_json=as_json, text=lambda: describe_search(found.to_json()) + note)
    if found.interrupted:
        raise KeyboardInterrupt


def _pinned(pairs: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Return dimension -> value; raises JobError for one that is pinned to two values."""
    pinned: dict[str, str] = {}
    for name, value in pairs:
        if pinned.setdefault(name, value) != value:
            raise JobError(
                where="command line",
                field="--pin",
                value=f"{name}={pinned[name]} and {name}={value}",
                rule="contradict each other",
                fix="keep one; --forbid leaves values out",
            )
    return pinned


def _pairs(text: str) -> dict[str, str]:
    """Read `pp=8,zero=1`."""
    option = KeyValue("pp=8", field="--why-not")
    return dict(option.convert(part.strip(), None, None) for part in text.split(",") if part.strip())


def _saved(found: Any, out: str) -> Any:
    try:
        return found.save(out)
    except OSError as problem:
        raise JobError(
            where="command line",
            field="--out",
            value=out,
            rule=f"cannot be written: {problem.strerror}",
            fix="name a folder that you may write",
        ) from None

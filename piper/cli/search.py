"""`piper search`: the fastest strategy that fits, and why the others lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from piper.cli.jobs import require_tokens, whole_run
from piper.cli.options import (
    KeyValue,
    PositiveInt,
    PositiveNumber,
    json_option,
    search_job_options,
    whole_run_options,
)
from piper.cli.output import emit, prepared, prepared_folder, prepared_picture, progress, write_text
from piper.errors import JobError

if TYPE_CHECKING:
    from piper.search import SearchResult


@click.command()
@click.argument("model", metavar="MODEL")
@search_job_options
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
@click.option("--space", metavar="FILE", help="Values, pins, refusals, spare memory (docs/search.md).")
@click.option("--pin", type=KeyValue("pp=4"), multiple=True, help="Allow only this value (repeatable).")
@click.option(
    "--forbid", type=KeyValue("recompute=full"), multiple=True, help="Leave this value out (repeatable)."
)
@click.option(
    "--why-not", metavar="k=v,k=v", default="", help="Say how the best strategy with these values loses."
)
@click.option(
    "--min-gpus", is_flag=True, help="Find the fewest GPUs that do, up to --gpus or of those listed there."
)
@click.option(
    "--target-step-time",
    type=PositiveNumber("20"),
    metavar="S",
    help="Slower than this is no answer where the number of GPUs is open; else whether it is met.",
)
@click.option(
    "--front",
    type=PositiveInt(20),
    metavar="N",
    help="Simulate up to N more along the Pareto front of time and memory.",
)
@click.option(
    "--robustness", is_flag=True, help="Whether the winner stays the best with kernels or links 10 % off."
)
@whole_run_options
@click.option("--plot", metavar="F.png|svg", help="Draw the Pareto front of step time and memory.")
@click.option("--heatmap", metavar="F.png|svg", help="Draw the best step time of every tp and pp.")
@click.option("--report", metavar="F.html", help="Write all of it as one page that opens from disk.")
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
      piper search llama3-70b --min-gpus --target-step-time 30 --global-batch 512
      piper search llama3-8b --gpus 32,64 --global-batch 512 --tokens 1000000000000 --price 2.5
    """
    from piper.report.ranking import describe_search

    pictures = {name: given.pop(name) for name in ("plot", "heatmap")}
    targets = {n: prepared_picture(p, option=f"--{n}") for n, p in pictures.items() if p is not None}
    page = given.pop("report")
    if page is not None:
        targets["report"] = prepared(page, option="--report")
    tokens, price = given.pop("tokens"), given.pop("price")
    require_tokens(tokens, price)
    if out is not None:
        given["db"] = given["db"] or str(prepared_folder(out, option="--out") / "search.sqlite")
    with progress(f"searching {model}") as say:
        found = _searched(model, given, say=say)
        if tokens is not None:
            found = replace(found, summary=_with_runs(found.summary, tokens, price=price, given=given))
        if out is not None:
            found = _saved(found, out)
        _draw(found.summary, targets, model=model)
    written = [*([Path(out)] if out else []), *targets.values()]
    note = "\n\n" + "\n".join(f"wrote {path}" for path in written) if written else ""
    emit(found.to_json(), as_json=as_json, text=lambda: describe_search(found.to_json()) + note)
    if found.interrupted:
        raise KeyboardInterrupt


def _searched(model: str, given: dict[str, Any], *, say: Callable[[str], None]) -> SearchResult:
    """Search with the options of the command."""
    from piper.search import SearchRequest, search_strategies

    stated = {name: value for name, value in given.items() if value is not None}
    stated |= _numbers(stated.pop("gpus", ()))
    stated |= {"time_limit_s": stated.pop("time_limit", None)}
    stated |= {"target_step_time_s": stated.pop("target_step_time", None)}
    stated["pin"] = _pinned(stated["pin"])
    stated["why_not"] = _pairs(stated["why_not"])
    if stated.get("clip_grad_norm") == 0:
        stated["clip_grad_norm"] = None
    if "space" in stated:
        stated = _with_space(stated, stated.pop("space"))
    return search_strategies(SearchRequest(model=model, **stated), on_progress=say)


def _numbers(gpus: tuple[int, ...]) -> dict[str, Any]:
    """Return one number of GPUs, the most of them for the fewest, or several."""
    if len(gpus) > 1:
        return {"gpu_counts": gpus}
    return {"gpus": gpus[0]} if gpus else {}


def _with_space(stated: dict[str, Any], path: str) -> dict[str, Any]:
    """Add what a space file says; the same said twice must agree."""
    from piper.search.space_file import read_space_file

    file = read_space_file(path)
    for name, value in file.pin.items():
        if stated["pin"].get(name, value) != value:
            raise JobError(
                where=path, field=f"pin.{name}", value=value,
                rule=f"contradicts --pin {name}={stated['pin'][name]}", fix="give it once, or equal",
            )  # fmt: skip
    values = dict(file.values)
    counts = values.pop("gpus", ())
    if counts and {"gpus", "gpu_counts"} & set(stated):
        raise JobError(
            where=path, field="values.gpus", value=counts, rule="is stated by --gpus as well",
            fix="give it once",
        )  # fmt: skip
    return stated | {
        "pin": dict(file.pin) | stated["pin"],
        "forbid": (*file.forbid, *stated["forbid"]),
        "values": values,
        "reserve_bytes": file.reserve_bytes,
        "only_runnable": file.only_runnable,
        **_numbers(tuple(int(gpus) for gpus in counts)),
    }


def _with_runs(
    summary: dict[str, Any], tokens: int, *, price: str | None, given: dict[str, Any]
) -> dict[str, Any]:
    """Add days, GPU-hours and cost of a whole run to every strategy."""

    def with_run(entry: dict[str, Any]) -> dict[str, Any]:
        return {**entry, "run": whole_run(entry, tokens, price=price, cluster=given["cluster"])}

    lists = {name: [with_run(entry) for entry in summary[name]] for name in ("ranking", "pareto")}
    return summary | lists | {"best": summary["best"] and with_run(summary["best"])}


def _draw(summary: dict[str, Any], targets: dict[str, Path], *, model: str) -> None:
    from piper.report.search_pictures import plot_front, plot_heat_map

    for name, draw in (("plot", plot_front), ("heatmap", plot_heat_map)):
        if name in targets:
            draw(summary, targets[name])
    if "report" in targets:
        from piper.report.search_page import render_search_page

        page = render_search_page(summary, title=model)
        write_text(str(targets["report"]), page, option="--report")


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

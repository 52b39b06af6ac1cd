"""One self-contained HTML page of one or several results: figures, timelines, memory, provenance.

Nothing is fetched when the page opens: style, script and data are inside the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cost_models import units
from piper.report import quantities, summary
from piper.report.likeness import comparable_s, unlike
from piper.report.page_data import timeline_data
from piper.report.result import Result, left_for_tensors_bytes
from piper.report.training import difference_lines

if TYPE_CHECKING:
    from jinja2 import Template

PART_NAMES = {
    "compute": "compute",
    "recompute": "recompute",
    "optimizer": "optimizer",
    "exposed_tp": "exposed tensor-parallel",
    "exposed_dp": "exposed data-parallel",
    "exposed_pp": "exposed pipeline",
    "exposed_ep": "exposed expert-parallel",
    "exposed_cp": "exposed context-parallel",
    "exposed_offload": "exposed offload",
    "straggler": "straggler wait",
    "host": "host",
    "bubble": "bubble",
}
"""Parts of a step in the order of the bars: work first, loss after."""


def render_page(results: Sequence[Result], *, title: str) -> str:
    """Return the page.

    Args:
        results: shown side by side, in this order; the first that fits and is fastest is the reference.
        title: of the page.
    """
    cards = [_card(result) for result in results]
    return template_of("page.html.j2").render(
        title=title,
        cards=cards,
        comparison=_comparison(cards),
        part_names=PART_NAMES,
        data=_script_safe([card["data"] for card in cards]),
    )


def template_of(name: str) -> Template:
    """Return a template of the pages, with what writes quantities."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("piper.report", "template"),
        autoescape=lambda name: name is not None and ".html" in name,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "duration": units.format_duration,
        "size": units.format_bytes,
        "count": quantities.format_count,
        "share": quantities.format_share,
        "ranges": lambda numbers: quantities.format_ranges(list(numbers)),
    }
    return environment.get_template(name)


def _card(result: Result) -> dict[str, Any]:
    """Gather what one result shows; a bare trace or a measured run has no full summary."""
    figures = result.summary
    full = "breakdown_s" in figures
    worst = max(figures["ranks"], key=lambda rank: int(rank["peak_memory_bytes"])) if full else {}
    data = timeline_data(result.timeline, step_time_s=result.step_time_s)
    if full:
        data |= {"limit_bytes": left_for_tensors_bytes(figures)}
    return {
        "name": result.name,
        "figures": figures,
        "full": full,
        "trained": "steps" in figures,
        "verdict": difference_lines(figures) if "steps" in figures else [],
        "step_time_s": result.step_time_s,
        "source": result.timeline.source,
        "parts": _parts(figures) if full else [],
        "classes": _classes(figures) if full else [],
        "peaks": worst.get("peak_owners", []),
        "worst_rank": worst.get("pipeline_rank", 0),
        "strategy": _strategy(figures),
        "assumed": [(name, _plain(value)) for name, value in figures.get("defaults", {}).items()],
        "memory_verdict": summary.memory_verdict(figures) if full else "",
        "text": summary.describe(figures) if full else "",
        "data": data,
    }


def _strategy(figures: Mapping[str, Any]) -> str:
    """Return the shorthand; a run's result has it as text, a bare trace has none."""
    stated = figures.get("strategy", "")
    return str(stated["shorthand"] if isinstance(stated, Mapping) else stated)


def _parts(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    breakdown = figures["breakdown_s"]
    step = figures["step_time_s"]
    return [
        {"key": key, "name": name, "seconds": breakdown[key], "share": breakdown[key] / step}
        for key, name in PART_NAMES.items()
        if breakdown.get(key, 0) > 0
    ]


def _classes(figures: Mapping[str, Any]) -> list[str]:
    """Return the memory classes that any rank uses, in the order of the first rank."""
    ranks = figures["ranks"]
    return [
        name
        for name in ranks[0]["memory_by_class_bytes"]
        if any(r["memory_by_class_bytes"][name] for r in ranks)
    ]


def _comparison(cards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the reference of the comparison: the fastest result that fits, else the fastest.

    Runs and traces are measured against each other only where nothing is predicted: a run beside a
    prediction is there to be looked at, and may be of another model.
    """
    predicted = [card for card in cards if card["full"]]
    compared = predicted or list(cards)
    fitting = [card for card in compared if card["figures"].get("fits", True)]
    figures = [card["figures"] for card in predicted]
    times = comparable_s(figures) if predicted else [card["step_time_s"] for card in compared]
    time_of = {id(card): time for card, time in zip(compared, times, strict=True)}
    best = min(fitting or compared, key=lambda card: time_of[id(card)])
    return {
        "best": best,
        "compared": compared,
        "that_fits": bool(predicted and fitting),
        "more": [time_of[id(c)] / time_of[id(best)] - 1 if id(c) in time_of else None for c in cards],
        "notes": unlike(figures),
        "longest_s": max(c["step_time_s"] for c in compared),
    }


def _script_safe(value: object) -> str:
    """Write JSON that may stand inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plain(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict | list | tuple) else str(value)

"""One self-contained HTML page of a search: the winner, the ranking, the front, the map, and the reasons."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from piper.report.page import PART_NAMES, template_of
from piper.report.ranking import describe_search
from piper.report.search_pictures import plot_front, plot_heat_map


def render_search_page(found: Mapping[str, Any], *, title: str) -> str:
    """Return the page of a result of `piper search`."""
    ranking = found["ranking"]
    return template_of("search.html.j2").render(
        title=title,
        found={"gpus": [], **found},
        best=found["best"] and {"run": None, **found["best"]},
        part_names=PART_NAMES,
        used={key: any(entry["breakdown_s"].get(key, 0) > 0 for entry in ranking) for key in PART_NAMES},
        longest_s=max((entry["step_time_s"] for entry in ranking), default=1.0),
        front=_drawn(found, plot_front),
        map=_drawn(found, plot_heat_map),
        text=describe_search(found),
    )


def _drawn(found: Mapping[str, Any], draw: Callable[[Mapping[str, Any], Path], Path]) -> str:
    """Return a picture as an element of the page."""
    with tempfile.TemporaryDirectory() as folder:
        text = draw(found, Path(folder) / "picture.svg").read_text(encoding="utf-8")
    return text[text.index("<svg") :]

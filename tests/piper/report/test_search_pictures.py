"""Pictures and the page of a search: the front, the best of every tp and pp, and all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from piper.report.search_page import render_search_page
from piper.report.search_pictures import plot_front, plot_heat_map
from simulator.errors import PlanError
from tests.piper.report.test_page import Page
from tests.piper.report.test_ranking import found as ranked


def entry(gpus: int, step_time_s: float, gib: float, shorthand: str) -> dict[str, Any]:
    return {
        "model": "tiny-llama", "n_gpus": gpus, "step_time_s": step_time_s,
        "peak_memory_bytes": int(gib * 2**30), "strategy": {"shorthand": shorthand},
    }  # fmt: skip


def tile(tp: int, pp: int, step_time_s: float | None, basis: str) -> dict[str, Any]:
    return {"gpus": 8, "tp": tp, "pp": pp, "step_time_s": step_time_s, "basis": basis, "strategy": None}


FOUND: dict[str, Any] = {
    "best": entry(8, 2.0, 30, "tp=2,pp=4,dp=1,schedule=zbv,recompute=none,micro_batch=1"),
    "pareto": [
        entry(8, 2.0, 30, "tp=2,pp=4,dp=1,schedule=zbv,recompute=none,micro_batch=1"),
        entry(8, 3.0, 20, "tp=2,pp=4,dp=1,schedule=1f1b,recompute=full,micro_batch=1"),
        entry(4, 5.0, 40, "pp=4,dp=1,schedule=1f1b,recompute=full,micro_batch=1"),
    ],
    "pareto_complete": False,
    "pareto_open": 1234,
    "heatmap": [
        tile(1, 8, 4.0, "estimated"), tile(2, 4, 2.0, "simulated"), tile(4, 2, 7.0, "bound"),
        tile(8, 1, None, "does not fit"),
    ],
}  # fmt: skip


def test_the_front_names_its_strategies_by_number_of_gpus(tmp_path: Path) -> None:
    text = plot_front(FOUND, tmp_path / "front.svg").read_text()
    for words in ("8 GPUs", "4 GPUs", "tp2 pp4 dp1 zbv b1", "1,234 others might be on it", "step time, s"):
        assert words in text


def test_a_complete_front_says_so(tmp_path: Path) -> None:
    found = FOUND | {"pareto_complete": True, "pareto_open": 0}
    assert "complete: by its bounds" in plot_front(found, tmp_path / "front.svg").read_text()


def test_the_heat_map_tells_what_is_simulated_estimated_and_bounded(tmp_path: Path) -> None:
    text = plot_heat_map(FOUND, tmp_path / "map.svg").read_text()
    for words in ("Best step time on 8 GPUs", "~4 s", "2 s", "&gt;7 s"):
        assert words in text


def test_a_search_without_an_answer_is_drawn_too(tmp_path: Path) -> None:
    nothing = {"best": None, "pareto": [], "pareto_complete": True, "pareto_open": 0, "heatmap": []}
    assert plot_front(nothing, tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")
    assert plot_heat_map(nothing, tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    dead = nothing | {"heatmap": [tile(1, 8, None, "does not fit")]}
    assert plot_heat_map(dead, tmp_path / "map.png").stat().st_size > 0


def test_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError):
        plot_front(FOUND, tmp_path / "front.pdf")


def test_the_page_shows_ranking_front_map_and_reasons_and_fetches_nothing() -> None:
    gpus = ranked()["best"]["n_gpus"]
    named = {"heatmap": [t | {"gpus": gpus} for t in FOUND["heatmap"]], "gap_basis": "over this <space>"}
    run = {"tokens": 1000, "steps": 10, "days": 2.5, "gpu_hours": 96.0, "cost": 1234.0, "currency": "EUR"}
    entries = [entry | {"run": run} for entry in ranked()["ranking"]]
    page = render_search_page(ranked(best=entries[0], ranking=entries, **named), title="A <model>")
    parsed = Page(page)
    assert parsed.open == []
    assert [link for link in parsed.links if not link.startswith("#")] == []
    for words in ("A <model>", "over this <space>", "pp=4", "dp=4", "1,234", "cost EUR", "2.5"):
        assert words in parsed.text
    for words in ("Pareto front", "Every tp and pp", "pp=2,recompute=full", "~4 s"):
        assert words in parsed.text


def test_the_page_of_a_search_without_an_answer_says_so() -> None:
    nothing = {"ranking": [], "best": None, "pareto": [], "lower_bound_s": None, "gap": None, "heatmap": []}
    assert "no strategy fits" in Page(render_search_page(ranked(**nothing), title="none")).text

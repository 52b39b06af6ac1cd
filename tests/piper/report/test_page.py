"""The HTML page: self-contained, complete, safe, small enough."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np

from piper.report import page_data
from piper.report.page import render_page
from piper.report.page_data import timeline_data
from piper.report.result import Result
from tests.piper.report.samples import GIB, figures, gpipe_timeline, sample_result
from tests.piper.report.test_training import trained


class Page(HTMLParser):
    """Collect text, links and the stack of open elements."""

    VOID = ("meta", "link", "input", "br", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = ""
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in {"src", "href"}]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in {"script", "style"}:
            self.text += data


def embedded_data(page: str) -> list[dict[str, Any]]:
    match = re.search(r"const RESULTS = (.*);\n", page)
    assert match is not None
    data: list[dict[str, Any]] = json.loads(match[1])
    return data


def test_the_page_fetches_nothing_and_is_well_formed() -> None:
    page = render_page([sample_result()], title="A title")
    parsed = Page(page)
    assert parsed.open == []
    assert [link for link in parsed.links if not link.startswith("#")] == []
    assert "http://" not in page
    assert "https://" not in page
    assert "url(" not in page
    assert len(page.encode()) < 100_000


def test_the_page_shows_every_figure_of_a_result() -> None:
    text = Page(render_page([sample_result(warnings=["one shard"])], title="A title")).text
    expected = (
        "A title",
        "14.00 ms",
        "12.60 ms to 16.80 ms",
        "38.1 %",
        "505 k tokens/s",
        "one shard",
        "adamw",
        "datasheet",
        "75.0 %",
        "exposed pipeline",
        "3.00 GiB",
        "pp=2,dp=2,schedule=gpipe",
    )
    assert [shown for shown in expected if shown not in text] == []


def test_two_results_are_compared_against_the_fastest_that_fits() -> None:
    slow, fast = sample_result("slow", step_time_s=0.028), sample_result("fast")
    over = sample_result("over", step_time_s=0.007, fits=False)
    text = Page(render_page([slow, fast, over], title="t")).text
    assert "Against fast, the fastest that fits" in text
    assert "+100.0 %" in text
    assert "-50.0 %" in text


def test_a_run_beside_predictions_is_not_ranked_with_them() -> None:
    measured = replace(gpipe_timeline(), source="measured")
    run = Result(name="run", summary=trained(), timeline=measured)
    text = Page(
        render_page(
            [sample_result("slow", step_time_s=99.0), sample_result("fast", step_time_s=98.0), run], title="t"
        )
    ).text
    assert "Against fast, the fastest that fits" in text
    assert "+1.0 %" in text
    assert "99.9 %" not in text
    other = Result(name="other", summary=trained(), timeline=measured)
    assert "Against run, the fastest." in Page(render_page([run, other], title="t")).text


def test_results_of_one_name_are_told_apart() -> None:
    page = render_page([sample_result("out"), sample_result("out", step_time_s=0.028)], title="t")
    assert "+100.0 %" in Page(page).text
    assert page.count('class="best"') == 1


def test_one_result_has_no_comparison() -> None:
    assert "Comparison" not in Page(render_page([sample_result()], title="t")).text


def test_a_bare_trace_shows_its_timeline_alone() -> None:
    bare = Result(name="trace.json", summary={}, timeline=gpipe_timeline())
    page = render_page([sample_result(), bare], title="t")
    assert "simulated, timeline only" in Page(page).text
    assert embedded_data(page)[1]["ranks"][0]["codes"][0] == "0F0"


def test_a_training_run_shows_its_steps_and_its_verdict() -> None:
    result = Result(name="run", summary=trained(), timeline=replace(gpipe_timeline(), source="measured"))
    text = Page(render_page([result], title="t")).text
    assert "trained on 4 cpu processes" in text
    assert "5.500000" in text
    assert "Compared with one process: equal" in text
    assert "whole batch: loss 1.0e-08" in text


def test_text_from_outside_cannot_become_markup() -> None:
    evil = "<script>alert(1)</script>"
    page = render_page([sample_result(evil, warnings=[evil])], title=evil)
    assert evil not in page
    assert Page(page).text.count(evil) >= 3
    track = replace(gpipe_timeline().tracks[0], codes=("</script><b>",) * 8)
    timeline = replace(gpipe_timeline(), tracks=(track,))
    page = render_page([Result(name="n", summary={}, timeline=timeline)], title="t")
    assert "</script><b>" not in page
    assert embedded_data(page)[0]["ranks"][0]["codes"][0] == "</script><b>"


def test_the_data_has_every_span_in_time_order_by_stream() -> None:
    timeline = gpipe_timeline()
    data = timeline_data(timeline, step_time_s=0.014)
    rank = data["ranks"][0]
    spans = {
        (rank["streams"][stream], rank["codes"][task], start * 100, (start + length) * 100)
        for stream, task, start, length in zip(
            rank["stream"], rank["task"], rank["start"], rank["length"], strict=True
        )
    }
    assert spans == {(stream, code, start, end) for r, stream, code, start, end in timeline.rows() if r == 0}
    assert list(zip(rank["stream"], rank["start"], strict=True)) == sorted(
        zip(rank["stream"], rank["start"], strict=True)
    )
    assert (data["window"], data["end"], data["begin"]) == (140_000, 280_000, 0)


def test_a_long_timeline_keeps_its_last_step_and_then_fewer_ranks(monkeypatch: Any) -> None:
    timeline = gpipe_timeline(pipeline_ranks=8, microbatches=4, steps=2)
    spans = sum(len(track.task) for track in timeline.tracks)
    step_s = timeline.step_time_ns / 1e9
    monkeypatch.setattr(page_data, "MOST_SPANS", spans // 2)
    data = timeline_data(timeline, step_time_s=step_s)
    assert len(data["ranks"]) == 8
    assert {step for rank in data["ranks"] for step in rank["step"]} == {1}
    monkeypatch.setattr(page_data, "MOST_SPANS", spans // 4)
    data = timeline_data(timeline, step_time_s=step_s)
    assert [rank["pipeline_rank"] for rank in data["ranks"]] == [0, 2, 5, 7]
    assert data["left_out"] == 4


def test_a_thinned_memory_curve_keeps_its_peak(monkeypatch: Any) -> None:
    monkeypatch.setattr(page_data, "MOST_MEMORY_POINTS", 10)
    track = gpipe_timeline().tracks[0]
    curve = np.zeros((1000, 7), dtype=np.int64)
    curve[:, 0], curve[777, 3] = GIB, 5 * GIB
    long = replace(track, memory_ns=np.arange(1000, dtype=np.int64) * 1000, memory_bytes=curve)
    memory = timeline_data(replace(gpipe_timeline(), tracks=(long,)), step_time_s=1.0)["ranks"][0]["memory"]
    assert memory["thinned"]
    assert len(memory["at"]) <= 12
    assert (memory["at"][0], memory["at"][-1]) == (0, 9990)
    assert max(sum(row) for row in memory["bytes"]) == 6 * GIB


def test_the_same_results_give_the_same_bytes() -> None:
    assert render_page([sample_result()], title="t") == render_page([sample_result()], title="t")


def test_the_figures_of_the_sample_add_up() -> None:
    """The samples stand for real results, so they must keep their laws."""
    sample = figures()
    assert abs(sum(sample["breakdown_s"].values()) - sample["step_time_s"]) < 1e-12
    for rank in sample["ranks"]:
        assert sum(rank["memory_by_class_bytes"].values()) == rank["peak_memory_bytes"]

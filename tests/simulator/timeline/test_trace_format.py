"""Traces held against the rules of the "Trace Event Format" (Google, 2016), event by event."""

from __future__ import annotations

import gzip
import json
import math
from itertools import pairwise

import pytest

from piper.predict import Job, predict
from piper.strategy import load_strategy
from simulator.timeline.chrome import write_chrome_trace

STRATEGIES = {
    "tiny-llama": "pp=2,dp=2,schedule=zb_h1,zero=1",
    "tiny-moe": "pp=2,dp=2,ep=2,schedule=interleaved_1f1b",
}
KEYS = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "M": {"name", "pid", "args"},
    "C": {"name", "pid", "ts", "args"},
    "i": {"name", "cat", "pid", "tid", "ts", "s"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id"},
}
"""What an event of each phase must have: complete, metadata, counter, instant, start and end of a flow."""
METADATA = {
    "process_name": "name",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@pytest.fixture(scope="module", params=STRATEGIES)
def events(request, tmp_path_factory):
    job = Job(model=request.param, strategy=load_strategy(STRATEGIES[request.param]), global_batch=8)
    found = predict(job)
    path = tmp_path_factory.mktemp("trace") / "trace.json.gz"
    write_chrome_trace(found.timeline, path, plan=found.compiled.plan)
    document = json.loads(gzip.decompress(path.read_bytes()), parse_constant=refuse)
    assert isinstance(document["traceEvents"], list)
    assert document["displayTimeUnit"] in {"ms", "ns"}
    return document["traceEvents"]


def of(events, phase):
    return [event for event in events if event["ph"] == phase]


def test_every_event_has_the_keys_of_its_phase_with_values_of_their_types(events):
    for event in events:
        assert event.keys() >= KEYS[event["ph"]], event
        assert isinstance(event["name"], str)
        for number in ("pid", "tid"):
            assert isinstance(event.get(number, 0), int)
        for time in ("ts", "dur"):
            assert math.isfinite(event.get(time, 0))
            assert event.get(time, 0) >= 0
        assert isinstance(event.get("cat", ""), str)
        assert isinstance(event.get("args", {}), dict)


def test_metadata_names_every_process_and_thread_that_has_slices(events):
    named = {(event["name"], event["pid"], event["tid"]) for event in of(events, "M")}
    processes = {pid for name, pid, _ in named if name == "process_name"}
    assert {name for name, _, _ in named} == set(METADATA)
    for event in of(events, "M"):
        assert list(event["args"]) == [METADATA[event["name"]]]
    for event in of(events, "X"):
        assert ("thread_name", event["pid"], event["tid"]) in named
        assert event["pid"] in processes


def test_a_thread_that_a_viewer_would_take_for_the_main_one_is_the_compute_stream(events):
    pids = {event["pid"] for event in of(events, "X")}
    for event in of(events, "M"):
        if event["name"] == "thread_name" and event["tid"] in {0, *pids}:
            assert (event["tid"], event["args"]["name"]) == (event["pid"], "compute")


def test_marks_of_steps_are_global_and_stand_at_their_ends(events):
    marks = of(events, "i")
    assert [mark["name"] for mark in marks] == [f"end of step {step}" for step in range(len(marks))]
    for step, mark in enumerate(marks):
        ends = [e["ts"] + e["dur"] for e in of(events, "X") if e["args"]["step"] == step]
        assert mark["s"] == "g"
        assert round(mark["ts"] * 1000) == round(max(ends) * 1000)


def test_slices_of_a_thread_do_not_overlap(events):
    threads = {}
    for event in of(events, "X"):
        begin = round(event["ts"] * 1000)
        span = (begin, begin + round(event["dur"] * 1000))
        threads.setdefault((event["pid"], event["tid"]), []).append(span)
    for spans in threads.values():
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(spans)))


def test_every_flow_starts_once_ends_once_and_both_lie_in_slices(events):
    starts = {event["id"]: event for event in of(events, "s")}
    ends = {event["id"]: event for event in of(events, "f")}
    assert starts
    assert len(starts) == len(of(events, "s"))
    assert len(ends) == len(of(events, "f"))
    assert starts.keys() == ends.keys()
    begins = {(event["pid"], event["tid"], event["ts"]) for event in of(events, "X")}
    for number, start in starts.items():
        end = ends[number]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        assert start["ts"] <= end["ts"]
        assert end["bp"] == "e"
        for event in (start, end):
            assert (event["pid"], event["tid"], event["ts"]) in begins


def test_counters_have_one_series_of_numbers_each_in_order_of_time(events):
    by_process = {}
    for event in of(events, "C"):
        assert all(isinstance(value, int) and value >= 0 for value in event["args"].values())
        by_process.setdefault((event["pid"], event["name"]), []).append(event)
    assert {pid for pid, _ in by_process} == {event["pid"] for event in of(events, "X")}
    for counter in by_process.values():
        assert len({tuple(event["args"]) for event in counter}) == 1
        assert all(before["ts"] <= after["ts"] for before, after in pairwise(counter))

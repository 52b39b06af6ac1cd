from __future__ import annotations

import gzip
import json
from dataclasses import replace

import pytest

from simulator import simulate
from simulator.errors import PlanError
from simulator.timeline.chrome import chrome_trace, write_chrome_trace
from tests.plans import Costs, FakeCostModel, one_f_one_b_rows, pipeline_plan

COSTS = Costs(forward_ns=1234567, backward_ns=2345678, update_ns=1001)
MODEL = FakeCostModel(transfer_ns=lambda *_: 333, collective_ns=lambda *_: 4444, launch_ns=7)


@pytest.fixture(scope="module")
def plan():
    return pipeline_plan(one_f_one_b_rows(4, 6), costs=COSTS, replicas=2, clip=True)


@pytest.fixture(scope="module")
def timeline(plan):
    return simulate(plan, MODEL, steps=2)


def phase(trace, letter):
    return [event for event in trace["traceEvents"] if event["ph"] == letter]


def test_every_span_is_a_slice_with_its_code_and_exact_nanoseconds(plan, timeline):
    trace = json.loads(json.dumps(chrome_trace(timeline, plan=plan)))
    slices = {
        (e["pid"], e["name"], round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000))
        for e in phase(trace, "X")
    }
    assert slices == {(rank, code, start, end) for rank, _, code, start, end in timeline.rows()}
    assert phase(trace, "X")[0]["args"]["step"] == 0


def test_one_process_per_rank_and_one_thread_per_stream_are_named(plan, timeline):
    names = phase(chrome_trace(timeline, plan=plan), "M")
    processes = {e["pid"]: e["args"]["name"] for e in names if e["name"] == "process_name"}
    assert processes[2] == "pp rank 1 (x2), stage 1, rank"
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in names if e["name"] == "thread_name"}
    assert threads[2, 2] == "compute"
    assert {name for (pid, _), name in threads.items() if pid == 2} == {
        "compute",
        "recv<0",
        "send>2",
        "recv<2",
        "send>0",
        "dp",
    }


def test_every_transfer_has_one_arrow_from_inside_its_send_to_inside_its_receive(plan, timeline):
    trace = chrome_trace(timeline, plan=plan)
    starts, ends = ({e["id"]: e for e in phase(trace, letter)} for letter in "sf")
    assert set(starts) == set(ends)
    assert len(starts) == 2 * (3 * 6 * 2)
    slices = {(e["pid"], e["tid"], e["ts"]): e for e in phase(trace, "X")}
    for number, start in starts.items():
        end = ends[number]
        sent = slices[start["pid"], start["tid"], start["ts"]]["name"]
        received = slices[end["pid"], end["tid"], end["ts"]]["name"]
        assert sent.split("SEND")[1] == received.split("RECV")[1]
        assert abs(start["pid"] - end["pid"]) == 2
        assert end["ts"] >= start["ts"]
        assert end["bp"] == "e"


def test_memory_counters_follow_the_curve_by_class(plan, timeline):
    counters = [e for e in phase(chrome_trace(timeline, plan=plan), "C") if e["pid"] == 0]
    totals, by_class = (
        [e for e in counters if e["name"] == name] for name in ("allocated (bytes)", "memory (bytes)")
    )
    for counter in (totals, by_class):
        assert [round(e["ts"] * 1000) for e in counter] == timeline.tracks[0].memory_ns.tolist()
    assert by_class[0]["args"] == {"parameters": 100, "gradients": 200, "activations": 0}
    assert totals[0]["args"] == {"bytes": 300}


def test_without_a_plan_there_are_slices_but_no_arrows(timeline):
    trace = chrome_trace(timeline)
    assert phase(trace, "X")
    assert not phase(trace, "s")


def test_a_measured_timeline_has_one_track_per_rank_and_arrows_between_peers_of_one_replica(plan, timeline):
    unfolded = [
        replace(track, rank=track.rank + replica, n_devices=1)
        for track in timeline.tracks
        for replica in range(2)
    ]
    trace = chrome_trace(replace(timeline, source="measured", tracks=tuple(unfolded)), plan=plan)
    pairs = zip(phase(trace, "s"), phase(trace, "f"), strict=True)
    assert {(a["pid"] % 2, b["pid"] % 2) for a, b in pairs} == {(0, 0), (1, 1)}


def test_the_suffix_gz_compresses_and_equal_timelines_give_equal_bytes(tmp_path, plan, timeline):
    plain = write_chrome_trace(timeline, tmp_path / "t.json", plan=plan)
    packed = write_chrome_trace(timeline, tmp_path / "t.json.gz", plan=plan)
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert json.loads(plain.read_text())["otherData"]["source"] == "simulated"
    again = write_chrome_trace(simulate(plan, MODEL, steps=2), tmp_path / "again.json.gz", plan=plan)
    assert again.read_bytes() == packed.read_bytes()


def test_a_trace_that_cannot_be_written_names_the_path(tmp_path, timeline):
    with pytest.raises(PlanError) as caught:
        write_chrome_trace(timeline, tmp_path / "missing" / "t.json")
    assert caught.value.field == "path"
    assert "writable" in caught.value.fix

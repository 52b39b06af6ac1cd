"""The memory snapshot, read by the functions of torch that read those of a GPU."""

from __future__ import annotations

import pickle
import pickletools

import pytest
import torch.cuda._memory_viz as viz

from simulator import simulate
from simulator.memory import memory_curve, rounded_bytes, run_allocator
from simulator.memory.snapshot import NS_PER_US, memory_snapshot, save_memory_snapshot
from tests.plans import FakeCostModel, PlanBuilder

MIB = 1 << 20
READ_BY_MEMORY_VIZ = {
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT",
    "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE", "LIST", "DICT",
    "APPEND", "APPENDS", "SETITEM", "SETITEMS", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "NEWFALSE", "NEWTRUE", "NONE", "SHORT_BINUNICODE", "BINUNICODE",
}  # fmt: skip
"""Opcodes that the unpickler of torch/utils/viz/MemoryViz.js knows."""


def story():
    """Static blocks of 3 MiB + 5 B and 700 B; each step one of 30 MiB."""
    builder = PlanBuilder()
    device = builder.devices[0]
    device.buffer("weights", 3 * MIB + 5, persistent=True)
    device.buffer("norms", 700, persistent=True)
    device.buffer("kept", 30 * MIB)
    device.compute("f", 5000, microbatch=0, allocates=["kept"], frees=["kept"])
    return builder.build()


def test_torch_reads_segments_blocks_and_events_and_their_sums_agree(tmp_path):
    plan = story()
    snapshot = memory_snapshot(plan, simulate(plan, FakeCostModel(), steps=2))
    path = save_memory_snapshot(snapshot, tmp_path / "memory.pickle")
    snapshot = pickle.loads(path.read_bytes())
    text = viz.segsum(snapshot)  # raises unless blocks sum to segments, and segments to what is reserved
    assert "segments: 3" in text
    assert [segment["total_size"] // MIB for segment in snapshot["segments"]] == [20, 2, 30]
    kept = [e for e in snapshot["device_traces"][0] if e["action"] == "alloc" and e["size"] == 30 * MIB]
    assert [[frame["filename"] for frame in event["frames"]] for event in kept] == [["buffer", "task"]] * 2
    events = viz.trace(snapshot)
    assert (events.count("cudaMalloc"), events.count("free completed")) == (3, 2)
    assert "weights" in viz.memory(snapshot, format_flamegraph=str)
    assert "snapshot.pickle" in viz.trace_plot(snapshot)
    assert "snapshot.pickle" in viz.segment_plot(snapshot)


def test_an_expandable_segment_is_one_segment_that_is_mapped_in_pieces():
    plan = story()
    timeline = simulate(plan, FakeCostModel(), steps=2)
    snapshot = memory_snapshot(plan, timeline, expandable_segments=True)
    large, small = snapshot["segments"]
    assert (large["total_size"] // MIB, small["total_size"] // MIB) == (40, 2)
    assert large["is_expandable"]
    mapped = [e for e in snapshot["device_traces"][0] if e["action"] == "segment_map"]
    pieces = [(event["addr"] - large["address"], event["size"] // MIB) for event in mapped]
    assert [piece for piece in pieces if 0 <= piece[0] < large["total_size"]] == [(0, 20), (20 * MIB, 20)]
    assert "segments: 2" in viz.segsum(snapshot)


@pytest.mark.parametrize("expandable", [False, True])
def test_the_events_add_up_to_the_curve_and_the_blocks_to_what_stays(expandable):
    plan = story()
    timeline = simulate(plan, FakeCostModel(), steps=3)
    (track,), (device,) = timeline.tracks, plan.device_plans
    snapshot = memory_snapshot(plan, timeline, expandable_segments=expandable)
    times = {"start_ns": track.start_ns.reshape(3, -1), "end_ns": track.end_ns.reshape(3, -1)}
    curve = memory_curve(device, **times, sizes=rounded_bytes(device.buffers.size_bytes))
    sign = {"alloc": 1, "free_completed": -1}
    (trace,) = snapshot["device_traces"]
    for time_ns, bytes_ in zip(curve.time_ns.tolist(), curve.class_bytes.sum(axis=1).tolist(), strict=True):
        until = [event for event in trace if event["time_us"] <= time_ns // NS_PER_US]
        assert sum(sign.get(event["action"], 0) * event["size"] for event in until) == bytes_
    used = sum(segment["allocated_size"] for segment in snapshot["segments"])
    assert used == (3 * MIB + 512) + 1024
    reserved = run_allocator(device, **times, expandable_segments=expandable).reserved_peak_bytes
    assert sum(segment["total_size"] for segment in snapshot["segments"]) == reserved


def test_memory_viz_knows_every_opcode_of_the_pickle(tmp_path):
    plan = story()
    snapshot = memory_snapshot(plan, simulate(plan, FakeCostModel(), steps=2))
    path = save_memory_snapshot(snapshot, tmp_path / "memory.pickle")
    used = {opcode.name for opcode, _, _ in pickletools.genops(path.read_bytes())}
    assert used <= READ_BY_MEMORY_VIZ

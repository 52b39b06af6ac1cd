"""The memory snapshot, read by the functions of torch that read those of a GPU."""

from __future__ import annotations

import pickle

import torch.cuda._memory_viz as viz

from simulator import simulate
from simulator.memory.snapshot import save_memory_snapshot
from tests.plans import FakeCostModel, PlanBuilder

MIB = 1 << 20


def test_torch_reads_segments_blocks_and_events_and_their_sums_agree(tmp_path):
    builder = PlanBuilder()
    device = builder.devices[0]
    device.buffer("weights", 3 * MIB + 5, persistent=True)
    device.buffer("norms", 700, persistent=True)
    device.buffer("kept", 30 * MIB)
    device.compute("f", 5000, microbatch=0, allocates=["kept"], frees=["kept"])
    plan = builder.build()
    path = save_memory_snapshot(plan, simulate(plan, FakeCostModel(), steps=2), tmp_path / "memory.pickle")
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

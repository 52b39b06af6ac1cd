"""PyTorch memory snapshot of a simulated run: what `torch.cuda.memory._snapshot()` would hold.

Format: `torch/cuda/_memory_viz.py` and https://pytorch.org/memory_viz (`torch/utils/viz/MemoryViz.js`):
`segments` with their blocks at the end of the run, and `device_traces`, a list of events per device. The
frames of an allocation are the owner of the buffer and, of what a task allocates, the code of that task.
Times are microseconds. Segments are those of a device that is never full ([Note: caching allocator]): one
wherever the reserved bytes rise, from the address that the request got; an expandable one is mapped piece by
piece.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simulator.memory.allocator import AllocatorRun, run_allocator
from simulator.memory.blocks import SMALL_BYTES, first_address_of_pool, pool_of
from simulator.plan import DevicePlan, Plan
from simulator.timeline.timeline import RankTrack, Timeline

NS_PER_US = 1000
PICKLE_PROTOCOL = 4
"""The newest that memory_viz reads."""


@dataclass(slots=True, kw_only=True)
class _Segment:
    """A segment, or an expandable one as far as it is mapped.

    Args:
        address, size: of all of it.
        instance: the allocation for which it was made.
    """

    address: int
    size: int
    instance: int


def memory_snapshot(
    plan: Plan,
    timeline: Timeline,
    *,
    tracks: Sequence[RankTrack] | None = None,
    expandable_segments: bool = False,
) -> dict[str, Any]:
    """Return the snapshot of a `timeline` of `plan`; a device of the snapshot is a track.

    Args:
        plan, timeline: what ran, and when.
        tracks: those of the timeline that are wanted (default: all).
        expandable_segments: as in `PYTORCH_CUDA_ALLOC_CONF`.
    """
    devices = {device.pipeline_rank: device for device in plan.device_plans}
    segments: list[dict[str, Any]] = []
    traces: list[list[dict[str, Any]]] = []
    for number, track in enumerate(timeline.tracks if tracks is None else tracks):
        device = devices[track.pipeline_rank]
        shape = (-1, len(device.tasks))
        run = run_allocator(
            device,
            start_ns=track.start_ns.reshape(shape),
            end_ns=track.end_ns.reshape(shape),
            expandable_segments=expandable_segments,
        )
        frames = _frames(device, run, codes=track.codes)
        trace, made = _trace(run, frames, expandable=expandable_segments)
        traces.append(trace)
        kept = _kept_blocks(device, run, frames)
        common = {"device": number, "is_expandable": expandable_segments}
        segments += [_segment(run, segment, kept=kept, frames=frames) | common for segment in made]
    return {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": {"expandable_segments": expandable_segments},
    }


def save_memory_snapshot(snapshot: dict[str, Any], path: str | Path) -> Path:
    """Write a snapshot as the pickle that memory_viz opens, and return the path; raises OSError."""
    target = Path(path)
    target.write_bytes(pickle.dumps(snapshot, protocol=PICKLE_PROTOCOL))
    return target


def _frames(device: DevicePlan, run: AllocatorRun, *, codes: Sequence[str]) -> list[list[dict[str, Any]]]:
    def frame(name: str, kind: str) -> dict[str, Any]:
        return {"name": name, "filename": kind, "line": 0}

    by_task = [[frame(code, "task")] for code in codes] + [[]]  # the last one: of no task (-1)
    rows = zip(run.buffer.tolist(), run.task.tolist(), strict=True)
    return [[frame(device.buffers.owner_of(buffer), "buffer"), *by_task[task]] for buffer, task in rows]


def _trace(
    run: AllocatorRun, frames: list[list[dict[str, Any]]], *, expandable: bool
) -> tuple[list[dict[str, Any]], list[_Segment]]:
    """Return the events, and the segments in the order in which they were made."""
    found: list[dict[str, Any]] = []
    made: dict[int, _Segment] = {}
    grown = np.diff(run.reserved_bytes, prepend=0).tolist()
    for event, time_ns, more in zip(run.events.tolist(), run.time_ns.tolist(), grown, strict=True):
        instance = event if event >= 0 else -1 - event
        entry = {
            "addr": int(run.address[instance]),
            "size": int(run.size_bytes[instance]),
            "stream": int(run.stream[instance]),
            "time_us": time_ns // NS_PER_US,
            "frames": frames[instance],
        }
        if more:
            action = "segment_map" if expandable else "segment_alloc"
            address = _add(made, run, instance, size=more, expandable=expandable)
            found.append(entry | {"action": action, "addr": address, "size": more})
        if entry["size"]:
            actions = ("alloc",) if event >= 0 else ("free_requested", "free_completed")
            found += [entry | {"action": action} for action in actions]
    return found, list(made.values())


def _add(made: dict[int, _Segment], run: AllocatorRun, instance: int, *, size: int, expandable: bool) -> int:
    """Add a segment, or a piece to the expandable one of its pool; return the address of what is new."""
    address = int(run.address[instance])
    if expandable:
        address = first_address_of_pool(pool_of(int(run.size_bytes[instance]), int(run.stream[instance])))
    segment = made.setdefault(address, _Segment(address=address, size=0, instance=instance))
    segment.size += size
    return address + segment.size - size


def _kept_blocks(
    device: DevicePlan, run: AllocatorRun, frames: list[list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the blocks that are in use at the end, by address."""
    alive = np.ones(len(run.buffer), dtype=np.bool_)
    alive[-1 - run.events[run.events < 0]] = False
    kept = np.flatnonzero(alive & (run.size_bytes > 0))
    return [
        {
            "address": int(run.address[i]),
            "size": int(run.size_bytes[i]),
            "requested_size": int(device.buffers.size_bytes[run.buffer[i]]),
            "state": "active_allocated",
            "frames": frames[i],
        }
        for i in kept[np.argsort(run.address[kept])].tolist()
    ]


def _segment(
    run: AllocatorRun, made: _Segment, *, kept: list[dict[str, Any]], frames: list[list[dict[str, Any]]]
) -> dict[str, Any]:
    """Return a segment with its blocks, the gaps filled with free ones, and its totals."""
    at, end = made.address, made.address + made.size
    inside = [block for block in kept if at <= block["address"] < end]
    blocks: list[dict[str, Any]] = []
    for start, block in [*((block["address"], block) for block in inside), (end, None)]:
        if start > at:
            blocks.append(
                {"address": at, "size": start - at, "requested_size": 0, "state": "inactive", "frames": []}
            )
        if block is not None:
            blocks.append(block)
            at = start + block["size"]
    used = sum(block["size"] for block in inside)
    return {
        "address": made.address,
        "total_size": made.size,
        "stream": int(run.stream[made.instance]),
        "segment_type": "small" if run.size_bytes[made.instance] <= SMALL_BYTES else "large",
        "segment_pool_id": (0, 0),
        "allocated_size": used,
        "active_size": used,
        "requested_size": sum(block["requested_size"] for block in inside),
        "blocks": blocks,
        "frames": frames[made.instance],
    }

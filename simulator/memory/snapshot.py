"""PyTorch memory snapshot of a simulated run: what `torch.cuda.memory._snapshot()` would hold.

Format: `torch/cuda/_memory_viz.py` and https://pytorch.org/memory_viz: `segments` with their blocks at the
end of the run, and `device_traces`, a list of events per device. A device is a pipeline rank; the frames of
an allocation are the owner of the buffer and, of what a task allocates, the code of that task. Times are
microseconds. Segments are those of a device that is never full ([Note: caching allocator]): one wherever
the reserved bytes rise, from the address that the request got.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from simulator.memory.allocator import AllocatorRun, run_allocator
from simulator.plan import DevicePlan, Plan
from simulator.timeline.timeline import Timeline

NS_PER_US = 1000


def memory_snapshot(plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """Return the snapshot of all tracks of a simulated `timeline` of `plan`."""
    devices = {device.pipeline_rank: device for device in plan.device_plans}
    segments: list[dict[str, Any]] = []
    traces: list[list[dict[str, Any]]] = []
    for number, track in enumerate(timeline.tracks):
        device = devices[track.pipeline_rank]
        shape = (-1, len(device.tasks))
        run = run_allocator(
            device, start_ns=track.start_ns.reshape(shape), end_ns=track.end_ns.reshape(shape)
        )
        frames = _frames(device, run, codes=track.codes)
        trace, made = _trace(run, frames)
        traces.append(trace)
        segments += [_segment(device, run, frames=frames, first=first, device_number=number) | size
                     for first, size in made]  # fmt: skip
    for segment in segments:
        _close(segment)
    return {"segments": segments, "device_traces": traces}


def save_memory_snapshot(plan: Plan, timeline: Timeline, path: str | Path) -> Path:
    """Write the snapshot as the pickle that memory_viz opens, and return the path; raises OSError."""
    target = Path(path)
    target.write_bytes(pickle.dumps(memory_snapshot(plan, timeline), protocol=4))
    return target


def _frames(device: DevicePlan, run: AllocatorRun, *, codes: tuple[str, ...]) -> list[list[dict[str, Any]]]:
    def frame(name: str, kind: str) -> dict[str, Any]:
        return {"name": name, "filename": kind, "line": 0}

    by_task = [[frame(code, "task")] for code in codes] + [[]]  # the last one: of no task (-1)
    rows = zip(run.buffer.tolist(), run.task.tolist(), strict=True)
    return [[frame(device.buffers.owner_of(buffer), "buffer"), *by_task[task]] for buffer, task in rows]


def _trace(
    run: AllocatorRun, frames: list[list[dict[str, Any]]]
) -> tuple[list[dict[str, Any]], list[tuple[int, dict[str, int]]]]:
    """Return the events, and of every segment the instance it was made for and its size."""
    found: list[dict[str, Any]] = []
    made: list[tuple[int, dict[str, int]]] = []
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
            made.append((instance, {"total_size": more}))
            found.append(entry | {"action": "segment_alloc", "size": more})
        if entry["size"]:
            actions = ("alloc",) if event >= 0 else ("free_requested", "free_completed")
            found += [entry | {"action": action} for action in actions]
    return found, made


def _segment(
    device: DevicePlan,
    run: AllocatorRun,
    *,
    frames: list[list[dict[str, Any]]],
    first: int,
    device_number: int,
) -> dict[str, Any]:
    """Return the segment that was made for instance `first`, with everything that may still be in it."""
    alive = np.ones(len(run.buffer), dtype=np.bool_)
    alive[-1 - run.events[run.events < 0]] = False
    kept = np.flatnonzero(alive & (run.size_bytes > 0) & (run.address >= run.address[first]))
    blocks = [
        {
            "address": int(run.address[i]),
            "size": int(run.size_bytes[i]),
            "requested_size": int(device.buffers.size_bytes[run.buffer[i]]),
            "state": "active_allocated",
            "frames": frames[i],
        }
        for i in kept[np.argsort(run.address[kept])].tolist()
    ]
    return {
        "device": device_number, "address": int(run.address[first]), "stream": int(run.stream[first]),
        "segment_type": "small" if run.size_bytes[first] <= 1 << 20 else "large", "blocks": blocks,
        "segment_pool_id": (0, 0), "is_expandable": False, "frames": frames[first],
    }  # fmt: skip


def _close(segment: dict[str, Any]) -> None:
    """Keep the blocks inside the segment, fill the gaps with free ones, and add the totals."""
    at, end = segment["address"], segment["address"] + segment["total_size"]
    inside = [block for block in segment["blocks"] if block["address"] < end]
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
    segment |= {
        "blocks": blocks, "allocated_size": used, "active_size": used,
        "requested_size": sum(block["requested_size"] for block in inside),
    }  # fmt: skip

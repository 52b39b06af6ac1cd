"""A result as a PyTorch memory snapshot, of the rank that was asked for or the fullest one."""

from __future__ import annotations

from pathlib import Path

from cost_models.errors import InternalError
from cost_models.units import format_bytes
from piper.interop.ranks import track_of
from piper.report.result import Result
from simulator.memory import peak_of
from simulator.memory.snapshot import memory_snapshot, save_memory_snapshot


def write(result: Result, path: Path, *, rank: int | None) -> str:
    """Write the snapshot (default: of the rank with the highest peak of allocated bytes)."""
    timeline, plan = result.timeline, result.plan
    if plan is None:
        raise InternalError("internal error: a memory snapshot of a result without a plan")
    fullest = max(timeline.tracks, key=lambda track: peak_of(track).total_bytes)
    track = fullest if rank is None else track_of(timeline, plan, rank=rank)
    expandable = bool(result.summary.get("expandable_segments", False))
    snapshot = memory_snapshot(plan, timeline, tracks=[track], expandable_segments=expandable)
    save_memory_snapshot(snapshot, path)
    shown = track.rank if rank is None else rank
    reserved = sum(segment["total_size"] for segment in snapshot["segments"])
    peak = peak_of(track).total_bytes
    return (
        f"rank {shown} (pipeline rank {track.pipeline_rank}): peak {format_bytes(peak)} allocated, "
        f"{format_bytes(reserved)} reserved in {len(snapshot['segments'])} segments; "
        "drop the file on https://pytorch.org/memory_viz"
    )

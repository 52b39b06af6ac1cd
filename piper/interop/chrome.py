"""A result as a Chrome trace, of all ranks or of one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from piper.interop.ranks import track_of
from piper.report.result import Result
from simulator.timeline.chrome import write_chrome_trace


def write(result: Result, path: Path, *, rank: int | None) -> str:
    """Write the trace; with a plan and all ranks it has an arrow from each send to its receive."""
    timeline, plan = result.timeline, result.plan
    if rank is None:
        write_chrome_trace(timeline, path, plan=plan)
    else:
        only = track_of(timeline, plan, rank=rank)
        write_chrome_trace(replace(timeline, tracks=(only,)), path)
    count = len(timeline.tracks) if rank is None else 1
    return f"{count} track{'s' if count > 1 else ''}; open it in https://ui.perfetto.dev"

"""Simulator: plan in, timeline out; never imports piper or torch.

Light on purpose: a public name is imported when it is first used. To add one: a line in `_PUBLIC`, and
one under TYPE_CHECKING.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulator.simulation import simulate
    from simulator.summary import summarize
    from simulator.timeline.storage import load_timeline, save_timeline
    from simulator.timeline.timeline import RankTrack, Timeline
    from simulator.workload import Workload, build_workload

_PUBLIC = {
    "RankTrack": "simulator.timeline.timeline",
    "Timeline": "simulator.timeline.timeline",
    "Workload": "simulator.workload",
    "build_workload": "simulator.workload",
    "load_timeline": "simulator.timeline.storage",
    "save_timeline": "simulator.timeline.storage",
    "simulate": "simulator.simulation",
    "summarize": "simulator.summary",
}

__all__ = [
    "RankTrack",
    "Timeline",
    "Workload",
    "build_workload",
    "load_timeline",
    "save_timeline",
    "simulate",
    "summarize",
]


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'simulator' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)

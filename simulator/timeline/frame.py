"""`Timeline` -> pandas DataFrame: one row per span (pandas is imported here only)."""

from __future__ import annotations

import numpy as np
import pandas as pd

from simulator.plan import TaskKind
from simulator.timeline.timeline import RankTrack, Timeline


def timeline_frame(timeline: Timeline) -> pd.DataFrame:
    """Return all spans of all tracks, in dispatch order, step after step."""
    return pd.concat([_track_frame(track) for track in timeline.tracks], ignore_index=True)


def _track_frame(track: RankTrack) -> pd.DataFrame:
    kinds = np.array([kind.name for kind in TaskKind])
    return pd.DataFrame(
        {
            "rank": track.rank,
            "pipeline_rank": track.pipeline_rank,
            "n_devices": track.n_devices,
            "step": track.step,
            "stream": np.array(track.streams)[track.stream],
            "code": np.array(track.codes)[track.task],
            "kind": kinds[track.kinds[track.task]],
            "dispatch_ns": track.dispatch_ns,
            "ready_ns": track.ready_ns,
            "start_ns": track.start_ns,
            "end_ns": track.end_ns,
        }
    )

"""Timeline <-> NPZ file (`timeline.npz` of an `--out` folder): columns as arrays, names as JSON; no pickles.

Layout, schema version 1: `header` (JSON text: schema_version, source, warnings, and per track its rank,
n_devices, pipeline_rank, stages, streams, codes), `step_end_ns`, and per track i the columns of
`RankTrack` as `track<i>.<column>`.
"""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from simulator.errors import PlanError
from simulator.timeline.check import timeline_fault
from simulator.timeline.timeline import RankTrack, Timeline

SCHEMA_VERSION = 1
_COLUMNS = (
    "task", "step", "stream", "dispatch_ns", "ready_ns", "start_ns", "end_ns", "memory_ns",
    "memory_bytes", "kinds",
)  # fmt: skip
_BROKEN = (
    OSError, EOFError, ValueError, KeyError, TypeError, NotImplementedError, MemoryError, RecursionError,
    zipfile.BadZipFile, zlib.error, struct.error,
)  # fmt: skip
"""What numpy, zip and JSON raise for a damaged file."""
_FACTS = ("rank", "n_devices", "pipeline_rank", "stages", "streams", "codes")


def save_timeline(timeline: Timeline, path: str | Path) -> Path:
    """Write `timeline` and return the path; the same timeline gives the same bytes."""
    target = Path(path)
    header = {
        "schema_version": SCHEMA_VERSION,
        "source": timeline.source,
        "warnings": timeline.warnings,
        "tracks": [_facts(track) for track in timeline.tracks],
    }
    arrays: dict[str, Any] = {"header": np.array(json.dumps(header)), "step_end_ns": timeline.step_end_ns}
    for number, track in enumerate(timeline.tracks):
        arrays |= {f"track{number}.{name}": getattr(track, name) for name in _COLUMNS}
    try:
        with target.open("wb") as file:
            np.savez_compressed(file, **arrays)
    except OSError as error:
        rule = f"cannot be written ({error.strerror})"
        raise _error(target, rule, fix="name a file in a folder that exists and is writable") from error
    return target


def _facts(track: RankTrack) -> dict[str, Any]:
    return {name: getattr(track, name) for name in _FACTS} | {"codes": tuple(track.codes)}


def load_timeline(path: str | Path) -> Timeline:
    """Read a timeline that `save_timeline` wrote.

    Raises: PlanError if the file is missing, broken, or of another version.
    """
    source = Path(path)
    fix = "give the timeline.npz of a folder that `--out` wrote"
    try:
        with np.load(source, allow_pickle=False) as arrays:
            header = json.loads(str(arrays["header"]))
            if header["schema_version"] != SCHEMA_VERSION:
                rule = f"has schema version {header['schema_version']}, this Piper reads {SCHEMA_VERSION}"
                raise _error(source, rule, fix="simulate again with this version")
            tracks = [_track(arrays, number, facts) for number, facts in enumerate(header["tracks"])]
            timeline = Timeline(
                source=header["source"],
                tracks=tuple(tracks),
                step_end_ns=arrays["step_end_ns"],
                warnings=tuple(header["warnings"]),
            )
    except FileNotFoundError as error:
        raise _error(source, "does not exist", fix=fix) from error
    except _BROKEN as error:
        raise _error(source, f"is no timeline file ({error})", fix=fix) from error
    fault = timeline_fault(timeline)
    if fault is not None:
        raise _error(source, f"contradicts itself: {fault}", fix=fix)
    return timeline


def _track(arrays: Any, number: int, facts: dict[str, Any]) -> RankTrack:
    columns = {name: arrays[f"track{number}.{name}"] for name in _COLUMNS}
    lists = {name: tuple(facts[name]) for name in ("stages", "streams", "codes")}
    return RankTrack(**(facts | lists | columns))


def _error(path: Path, rule: str, *, fix: str) -> PlanError:
    return PlanError(where="timeline file", field="path", value=str(path), rule=rule, fix=fix)

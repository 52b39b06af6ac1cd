"""Memory plot: allocated bytes over the last step, stacked by class, one panel per rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from simulator.plan import MemoryClass
from simulator.timeline.plots.picture import INK, MUTED, RULE, bare, picture, time_unit
from simulator.timeline.timeline import RankTrack, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    MemoryClass.PARAMETERS: "#3b6ea8",
    MemoryClass.GRADIENTS: "#3fa66b",
    MemoryClass.OPTIMIZER: "#c2473f",
    MemoryClass.ACTIVATIONS: "#f2a03d",
    MemoryClass.BUCKETS: "#a58bd6",
    MemoryClass.COMMUNICATION: "#9aa3ad",
    MemoryClass.WORKSPACE: "#5fb7c4",
}
GIB = 2**30
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
NEAR_LIMIT = 0.5
GRIDS = ((1, 1), (2, 4), (4, 16), (8, 1 << 30))
DENSE_COLUMNS = 8


def plot_memory(
    timeline: Timeline, path: str | Path, *, device_memory_bytes: int | None = None, title: str | None = None
) -> Path:
    """Draw memory over the last step; a device limit is drawn where the peak comes near it.

    Raises: PlanError if `path` is neither PNG nor SVG, or cannot be written.
    """
    tracks = timeline.tracks
    columns = _columns(len(tracks))
    rows = math.ceil(len(tracks) / columns)
    peak = max(int(track.memory_bytes.sum(axis=1).max()) for track in tracks)
    size, unit = next((size, unit) for size, unit in UNITS if peak >= size or size == 1)
    panel_in = (max(14.0 / columns, 1.9), float(np.interp(columns, [1, 4, 8], [2.6, 2.1, 1.35])))
    with picture(path, width_in=columns * panel_in[0], height_in=rows * panel_in[1] + 1.2) as figure:
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel().tolist()
        limit = (
            device_memory_bytes if device_memory_bytes and peak > NEAR_LIMIT * device_memory_bytes else None
        )
        for axes, track in zip(grid, tracks, strict=False):
            _panel(axes, track, timeline.window_ns, size=size, dense=columns >= DENSE_COLUMNS)
            if limit is not None:
                axes.axhline(limit / size, color="#b42318", linewidth=1.0, linestyle=(0, (4, 2)))
        for axes in grid[len(tracks) :]:
            axes.set_visible(False)
        grid[0].set_ylim(0, max(peak, limit or 0, 1) / size * 1.08)
        _decorate(figure, timeline, title=title, unit=unit, limit=limit)
    return Path(path)


def _columns(num_tracks: int) -> int:
    return next(columns for columns, most in GRIDS if num_tracks <= most)


def _panel(axes: Axes, track: RankTrack, window: tuple[int, int], *, size: int, dense: bool) -> None:
    times, stacked = _window_curve(track, window)
    unit_ns, _ = time_unit(window[1] - window[0])
    x = (times - window[0]) / unit_ns
    lower = np.zeros(len(times))
    for kind in MemoryClass:
        upper = lower + stacked[:, kind] / size
        axes.fill_between(x, lower, upper, step="post", color=COLOURS[kind], linewidth=0)
        lower = upper
    at = int(np.argmax(stacked.sum(axis=1)))
    axes.plot(
        x[at], lower[at], marker="o", markersize=3 if dense else 4.5, color=INK, clip_on=False, zorder=5
    )
    peak = f"{lower[at]:.3g}"
    name = f"rank {track.rank}"
    stages = "stage " + ", ".join(map(str, track.stages))
    shown = f"{name}: {peak}" if dense else f"{name}   {stages}   peak {peak} at {x[at]:.3g}"
    axes.set_title(shown, fontsize=7 if dense else 9, loc="left", color=INK, pad=3)
    axes.set_xlim(0, max(x[-1], 1e-9))
    axes.grid(axis="y", color=RULE, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=6 if dense else 8, length=2)
    bare(axes)


def _window_curve(
    track: RankTrack, window: tuple[int, int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the memory curve cut to the window: times from its begin to its end, and bytes by class."""
    begin, end = window
    first = max(int(np.searchsorted(track.memory_ns, begin, side="right")) - 1, 0)
    last = int(np.searchsorted(track.memory_ns, end, side="right"))
    times = np.append(np.maximum(track.memory_ns[first:last], begin), end)
    values = track.memory_bytes[first:last]
    return times, np.vstack([values, values[-1:]])


def _decorate(figure: Figure, timeline: Timeline, *, title: str | None, unit: str, limit: int | None) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    used = np.any([(track.memory_bytes > 0).any(axis=0) for track in timeline.tracks], axis=0)
    handles: list[Patch | Line2D] = [
        Patch(facecolor=COLOURS[kind], label=kind.name.lower()) for kind in MemoryClass if used[kind]
    ]
    handles.append(Line2D([], [], marker="o", linestyle="", markersize=4, color=INK, label="peak"))
    if limit is not None:
        label = f"usable {limit / GIB:.3g} GiB"
        handles.append(Line2D([], [], color="#b42318", linestyle=(0, (4, 2)), linewidth=1.0, label=label))
    _, time_name = time_unit(timeline.step_time_ns)
    figure.suptitle(
        title or f"Allocated memory, {timeline.source}", fontsize=12, x=0.01, ha="left", fontweight="bold"
    )
    figure.supxlabel(f"time in the step ({time_name})", fontsize=9, color=MUTED)
    figure.supylabel(f"allocated ({unit})", fontsize=9, color=MUTED)
    figure.legend(
        handles=handles, loc="outside lower left", ncols=len(handles), fontsize=8, frameon=False,
        handlelength=1.2, handleheight=0.9, columnspacing=1.4,
    )  # fmt: skip

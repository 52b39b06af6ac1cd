"""Memory plot: allocated bytes over the last step, stacked by class, one panel per rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from simulator.plan import MemoryClass
from simulator.timeline.plots.picture import (
    DASHED,
    INK,
    LIMIT,
    MUTED,
    RULE,
    Margins,
    bare,
    picture,
    set_margins,
    time_unit,
    write_legend,
    write_title,
)
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
WIDTH_IN = 14.0
TEXT_IN = 0.12
MARGINS = Margins(left_in=0.75, right_in=0.2, top_in=0.9, bottom_in=0.8)
GAP_IN = (0.18, 0.34)


def plot_memory(
    timeline: Timeline,
    path: str | Path,
    *,
    title: str | None = None,
    subtitle: str = "",
    limit_bytes: int | None = None,
) -> Path:
    """Draw memory over the last step.

    Args:
        timeline: whose last step.
        path: PNG or SVG by suffix.
        title, subtitle: above the picture.
        limit_bytes: what a device has for tensors; drawn where the peak comes near it.

    Raises: PlanError if `path` is neither PNG nor SVG, or cannot be written.
    """
    tracks = timeline.tracks
    columns = _columns(len(tracks))
    rows = math.ceil(len(tracks) / columns)
    peak = max(int(track.memory_bytes.sum(axis=1).max()) for track in tracks)
    size, unit = size_unit(peak)
    panel_in = float(np.interp(columns, [1, 4, 8], [2.6, 1.9, 1.2]))
    height_in = MARGINS.top_in + MARGINS.bottom_in + rows * panel_in + (rows - 1) * GAP_IN[1]
    with picture(path, width_in=WIDTH_IN, height_in=height_in) as figure:
        grid = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
        set_margins(figure, MARGINS, gap_in=GAP_IN)
        limit = limit_near(peak, limit_bytes)
        for axes in grid:
            axes.set_ylim(0, max(peak, limit or 0, 1) / size * 1.08)
        for number, (axes, track) in enumerate(zip(grid, tracks, strict=False)):
            _panel(axes, track, timeline.window_ns, scale=(size, unit), dense=columns >= DENSE_COLUMNS)
            edge = number % columns == 0
            axes.tick_params(left=edge, labelleft=edge, labelbottom=number + columns >= len(tracks))
            if limit is not None:
                axes.axhline(limit / size, color=LIMIT, linewidth=1.0, linestyle=DASHED)
        for axes in grid[len(tracks) :]:
            axes.set_visible(False)
        write_title(
            figure, title or f"Allocated memory, {timeline.source}", left_in=TEXT_IN, subtitle=subtitle
        )
        _decorate(figure, timeline, unit=unit, limit=limit)
    return Path(path)


def limit_near(peak_bytes: int, limit_bytes: int | None) -> int | None:
    """Return a limit that memory comes near, else None: then it would only make the curves flat."""
    return limit_bytes if limit_bytes is not None and peak_bytes > NEAR_LIMIT * limit_bytes else None


def limit_name(limit_bytes: int) -> str:
    """Return what the legend calls the limit."""
    return f"left for tensors: {limit_bytes / GIB:.3g} GiB"


def size_unit(size_bytes: int) -> tuple[int, str]:
    """Return (bytes per unit, unit) in which a size reads well."""
    return next((size, unit) for size, unit in UNITS if size_bytes >= size or size == 1)


def _columns(num_tracks: int) -> int:
    return next(columns for columns, most in GRIDS if num_tracks <= most)


def _panel(
    axes: Axes, track: RankTrack, window: tuple[int, int], *, scale: tuple[int, str], dense: bool
) -> None:
    size, unit = scale
    times, stacked = window_curve(track, window)
    unit_ns, time_name = time_unit(window[1] - window[0])
    x = (times - window[0]) / unit_ns
    axes.set_xlim(0, max(x[-1], 1e-9))
    axes.set_autoscale_on(False)
    lower = np.zeros(len(times))
    for kind in np.flatnonzero(stacked.any(axis=0)).tolist():
        upper = lower + stacked[:, kind] / size
        axes.fill_between(x, lower, upper, step="post", color=COLOURS[MemoryClass(kind)], linewidth=0)
        lower = upper
    at = int(np.argmax(stacked.sum(axis=1)))
    axes.plot(
        x[at], lower[at], marker="o", markersize=3 if dense else 4.5, color=INK, clip_on=False, zorder=5
    )
    plural = "s" if len(track.stages) != 1 else ""
    stages = f"stage{plural} {', '.join(map(str, track.stages))}"
    text = f"rank {track.rank}   {stages}   peak {lower[at]:.3g} {unit} at {x[at]:.3g} {time_name}"
    short = f"rank {track.rank}: {lower[at]:.3g} {unit}"
    axes.set_title(short if dense else text, fontsize=7 if dense else 8.5, loc="left", color=INK, pad=4)
    axes.grid(axis="y", color=RULE, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=6 if dense else 8, length=2)
    bare(axes)


def window_curve(
    track: RankTrack, window: tuple[int, int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the memory curve cut to the window: times from its begin to its end, and bytes by class."""
    begin, end = window
    first = max(int(np.searchsorted(track.memory_ns, begin, side="right")) - 1, 0)
    last = int(np.searchsorted(track.memory_ns, end, side="right"))
    times = np.append(np.maximum(track.memory_ns[first:last], begin), end)
    values = track.memory_bytes[first:last]
    return times, np.vstack([values, values[-1:]])


def _decorate(figure: Figure, timeline: Timeline, *, unit: str, limit: int | None) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    used = np.any([(track.memory_bytes > 0).any(axis=0) for track in timeline.tracks], axis=0)
    handles: list[Patch | Line2D] = [
        Patch(facecolor=COLOURS[kind], label=kind.name.lower()) for kind in MemoryClass if used[kind]
    ]
    handles.append(Line2D([], [], marker="o", linestyle="", markersize=4, color=INK, label="peak"))
    if limit is not None:
        handles.append(Line2D([], [], color=LIMIT, linestyle=DASHED, linewidth=1.0, label=limit_name(limit)))
    _, time_name = time_unit(timeline.step_time_ns)
    width, height = figure.get_size_inches().tolist()
    figure.text(0.5, 0.32 / height, f"time in the step ({time_name})", ha="center", fontsize=9, color=MUTED)
    where = (TEXT_IN / width, 0.5)
    figure.text(*where, f"allocated ({unit})", rotation=90, va="center", fontsize=9, color=MUTED)
    write_legend(figure, handles, left_in=TEXT_IN)

"""The section `jitter` of a result as a picture: step times, and the time that others wait for each rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.timeline.plots.picture import (
    INK,
    MUTED,
    RULE,
    Margins,
    bare,
    picture,
    set_margins,
    time_unit,
    write_title,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BINS = 30
LEFT_IN = 0.75
_STEPS, _PLANNED, _BLAMED, _WAITED = "#4c78a8", "#2f9e44", "#d9480f", "#9aa5b1"


def plot_jitter(section: Mapping[str, Any], path: str | Path) -> Path:
    """Draw the distribution of step times above the waits by rank; PNG or SVG by suffix.

    Raises: PlanError for another suffix or a path that cannot be written.
    """
    with picture(path, width_in=9.0, height_in=6.4) as figure:
        above, below = figure.subplots(2, 1)
        _draw_times(above, section)
        _draw_waits(below, section)
        margins = Margins(left_in=LEFT_IN, right_in=0.3, top_in=0.75, bottom_in=0.55)
        set_margins(figure, margins, gap_in=(0.0, 0.9))
        write_title(figure, f"{section['spec']}, seed {section['seed']}", left_in=LEFT_IN)
    return Path(path)


def _draw_times(axes: Axes, section: Mapping[str, Any]) -> None:
    times_s = np.concatenate([np.asarray(run, dtype=float) for run in section["step_times_s"]])
    planned_s = section["undisturbed_step_time_s"]
    unit_ns, unit = time_unit(int(float(times_s.max()) * 1e9))
    scale = 1e9 / unit_ns
    axes.hist(times_s * scale, bins=BINS if len(times_s) > 1 else 1, color=_STEPS, zorder=2)
    axes.axvline(planned_s * scale, color=_PLANNED, linewidth=1.5, zorder=3)
    low, high = min(planned_s, float(times_s.min())) * scale, max(planned_s, float(times_s.max())) * scale
    room = max(high - low, 1e-3 * high) * 0.06
    axes.set_xlim(low - room, high + room)
    labels = [(planned_s, "without jitter", _PLANNED)]
    labels += [(section["step_time_s"][name], name, MUTED) for name in ("p50", "p99")]
    for height, (value, name, colour) in enumerate(labels):
        axes.axvline(value * scale, color=colour, linewidth=0.8, linestyle=":", zorder=1)
        axes.annotate(
            name, (value * scale, 1.0 - 0.09 * height), xycoords=("data", "axes fraction"), xytext=(3, -2),
            textcoords="offset points", fontsize=8, color=colour, va="top",
        )  # fmt: skip
    axes.set_xlabel(f"step time, {unit}", fontsize=9)
    axes.set_ylabel("steps", fontsize=9)
    axes.tick_params(labelsize=8)
    bare(axes, keep=("bottom", "left"))


def _draw_waits(axes: Axes, section: Mapping[str, Any]) -> None:
    """Draw, for each rank of the last step that is shown, its waits downwards and those for it upwards."""
    units = section["units"]
    first, caused = np.asarray(units["first_rank"]), np.asarray(units["waited_for_s"], dtype=float)
    waits = np.asarray(units["waits_s"], dtype=float)
    unit_ns, unit = time_unit(int(max(caused.max(), waits.max()) * 1e9))
    scale = 1e9 / unit_ns
    axes.vlines(first, 0, caused * scale, color=_BLAMED, linewidth=1.2, zorder=2)
    axes.vlines(first, -waits * scale, 0, color=_WAITED, linewidth=0.8, zorder=2)
    axes.axhline(0, color=RULE, linewidth=0.8)
    for worst in section["blame"][:1]:
        top = int(np.searchsorted(first, worst["first_rank"]))
        axes.annotate(
            f"rank {worst['ranks']}", (first[top], caused[top] * scale), xytext=(4, -2), fontsize=8,
            textcoords="offset points", color=INK, va="top",
        )  # fmt: skip
    axes.set_xlabel("rank (lowest of those that do the same)", fontsize=9)
    axes.set_ylabel(f"waits (down), others wait (up), {unit}", fontsize=8)
    axes.tick_params(labelsize=8)
    bare(axes, keep=("left",))

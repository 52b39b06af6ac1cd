"""The result of a search as pictures: the Pareto front, and the best of every tp and pp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator.timeline.plots.picture import (
    INK,
    LIMIT,
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

_GIB = 2**30
_COLOURS = ("#4c78a8", "#d9480f", "#2f9e44", "#8e44ad", "#b08900", "#0b7285", "#a61e4d", "#495057")
_MOST_LABELS = 12
_LABEL = 0.45
"""Room for the label of the slowest, over the span of the times."""
_DARK = 0.6
"""Tiles darker than this share of the scale carry white text."""


def plot_front(found: Mapping[str, Any], path: str | Path) -> Path:
    """Draw step time against peak memory of the front, a colour for each number of GPUs; PNG or SVG.

    Raises: PlanError for another suffix or a path that cannot be written.
    """
    front = found["pareto"]
    unit_ns, unit = time_unit(int(1e9 * max((entry["step_time_s"] for entry in front), default=1.0)))
    longest = max((entry["step_time_s"] for entry in front), default=1.0) * 1e9 / unit_ns
    with picture(path, width_in=8.0, height_in=5.0) as figure:
        axes = figure.subplots()
        for number, gpus in enumerate(sorted({entry["n_gpus"] for entry in front})):
            mine = [entry for entry in front if entry["n_gpus"] == gpus]
            _draw_steps(
                axes,
                mine,
                colour=_COLOURS[number % len(_COLOURS)],
                label=f"{gpus} GPUs",
                unit_s=unit_ns / 1e9,
            )
        axes.set_xlabel(f"step time, {unit}", fontsize=9)
        axes.set_ylabel("peak memory of the worst rank, GiB", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(color=RULE, linewidth=0.5)
        axes.set_axisbelow(True)
        axes.margins(x=0.05, y=0.1)
        axes.set_xlim(right=axes.get_xlim()[1] + _LABEL * (longest - axes.get_xlim()[0]))
        bare(axes, keep=("bottom", "left"))
        if front:
            axes.legend(fontsize=8, frameon=False)
        set_margins(figure, Margins(left_in=0.75, right_in=0.3, top_in=0.75, bottom_in=0.55))
        write_title(figure, _title("Pareto front", found), left_in=0.75, subtitle=_complete(found))
    return Path(path)


def _draw_steps(
    axes: Axes, entries: Sequence[Mapping[str, Any]], *, colour: str, label: str, unit_s: float
) -> None:
    times = [entry["step_time_s"] / unit_s for entry in entries]
    memory = [entry["peak_memory_bytes"] / _GIB for entry in entries]
    axes.step(times, memory, where="post", color=colour, linewidth=1.0, alpha=0.6)
    axes.plot(times, memory, "o", color=colour, markersize=5, label=label)
    every = max(1, -(-len(entries) // _MOST_LABELS))
    for entry, x, y in list(zip(entries, times, memory, strict=True))[::every]:
        axes.annotate(
            _degrees(entry["strategy"]["shorthand"]), (x, y), xytext=(5, 4), textcoords="offset points",
            fontsize=6.5, color=MUTED,
        )  # fmt: skip


def plot_heat_map(found: Mapping[str, Any], path: str | Path) -> Path:
    """Draw the best step time of every tp (columns) and pp (rows), at the GPUs of the winner; PNG or SVG.

    Raises: PlanError for another suffix or a path that cannot be written.
    """
    tiles = found["heatmap"]
    gpus = found["best"]["n_gpus"] if found["best"] else max((t["gpus"] for t in tiles), default=0)
    tiles = [tile for tile in tiles if tile["gpus"] == gpus]
    columns, rows = (sorted({tile[name] for tile in tiles}) for name in ("tp", "pp"))
    width, height = max(5.5, 1.8 + 0.95 * len(columns)), max(2.6, 1.7 + 0.5 * len(rows))
    with picture(path, width_in=width, height_in=height) as figure:
        axes = figure.subplots()
        _draw_tiles(axes, tiles, columns=columns, rows=rows)
        axes.set_xticks(range(len(columns)), [str(tp) for tp in columns])
        axes.set_yticks(range(len(rows)), [str(pp) for pp in rows])
        axes.set_xlabel("tp", fontsize=9)
        axes.set_ylabel("pp", fontsize=9)
        axes.tick_params(labelsize=8, length=0)
        bare(axes, keep=())
        set_margins(figure, Margins(left_in=0.65, right_in=0.25, top_in=0.75, bottom_in=0.55))
        note = "bold: simulated; ~ estimated; > bound, none is faster; -: nothing fits"
        write_title(figure, _title(f"Best step time on {gpus} GPUs", found), left_in=0.65, subtitle=note)
    return Path(path)


def _draw_tiles(
    axes: Axes, tiles: Sequence[Mapping[str, Any]], *, columns: Sequence[int], rows: Sequence[int]
) -> None:
    import numpy as np

    if not tiles:
        return
    grid = np.full((len(rows), len(columns)), np.nan)
    for tile in tiles:
        if tile["step_time_s"] is not None:
            grid[rows.index(tile["pp"]), columns.index(tile["tp"])] = np.log(tile["step_time_s"])
    known = grid[~np.isnan(grid)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
    # A third of the scale stays free at the dark end, where text would be hard to read.
    axes.imshow(grid, cmap="Blues", vmin=low, vmax=high + 0.3 * (high - low) + 1e-9, aspect="auto")
    for tile in tiles:
        x, y = columns.index(tile["tp"]), rows.index(tile["pp"])
        share = 0.0 if np.isnan(grid[y, x]) else (grid[y, x] - low) / (1.3 * (high - low) + 1e-9)
        axes.text(
            x, y, _tile_text(tile), ha="center", va="center", fontsize=7.5,
            fontweight="bold" if tile["basis"] == "simulated" else "normal",
            color=LIMIT if tile["basis"] == "does not fit" else "white" if share > _DARK else INK,
        )  # fmt: skip


def _tile_text(tile: Mapping[str, Any]) -> str:
    seconds = tile["step_time_s"]
    if seconds is None:
        return "-"
    unit_ns, unit = time_unit(int(seconds * 1e9))
    mark = {"estimated": "~", "bound": ">"}.get(tile["basis"], "")
    return f"{mark}{seconds * 1e9 / unit_ns:.4g} {unit}"


def _title(text: str, found: Mapping[str, Any]) -> str:
    return f"{text}: {found['best']['model']}" if found["best"] else text


def _complete(found: Mapping[str, Any]) -> str:
    if found["pareto_complete"]:
        return "complete: by its bounds no other strategy of the space is on it, relative to our simulator"
    return f"of what was simulated; by their bounds {found['pareto_open']:,} others might be on it"


_SHORT = {"micro_batch": "b", "zero": "z"}


def _degrees(shorthand: str) -> str:
    """Return what tells points apart: degrees, schedule and recomputation."""
    kept = ("tp", "pp", "vp", "cp", "ep", "dp", "zero", "schedule", "recompute", "micro_batch")
    parts = [part.partition("=") for part in shorthand.split(",")]
    return " ".join(
        value if name in {"schedule", "recompute"} else f"{_SHORT.get(name, name)}{value}"
        for name, _, value in parts
        if name in kept and value not in {"none", "1f1b"}
    )

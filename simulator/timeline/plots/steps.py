"""Timeline plot: the last step, one band per rank: compute tall, other streams thin, memory below.

With many ranks the other streams share one lane, and memory is drawn once, that of the fullest rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from simulator.plan import NONE, MemoryClass, TaskKind, TaskName
from simulator.timeline.gantt import format_duration
from simulator.timeline.plots.memory import limit_name, limit_near, size_unit, window_curve
from simulator.timeline.plots.picture import (
    DASHED,
    INK,
    LIMIT,
    MUTED,
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
    TaskKind.F: "#4c8fd1",
    TaskKind.B: "#3fa66b",
    TaskKind.BI: "#2f9c95",
    TaskKind.BW: "#f2a03d",
    TaskKind.R: "#a58bd6",
    TaskKind.NORM: "#d96c8f",
    TaskKind.UPDATE: "#c2473f",
    TaskKind.SEND_F: "#9aa3ad",
    TaskKind.RECV_F: "#9aa3ad",
    TaskKind.SEND_B: "#9aa3ad",
    TaskKind.RECV_B: "#9aa3ad",
    TaskKind.ALL_REDUCE: "#374151",
    TaskKind.REDUCE_SCATTER: "#8a5a2b",
    TaskKind.ALL_GATHER: "#c9a15a",
    TaskKind.ALL_TO_ALL: "#0f766e",
    TaskKind.RING_SHIFT: "#7c6a9c",
    TaskKind.OFFLOAD: "#5fb7c4",
    TaskKind.RELOAD: "#5fb7c4",
}
NAMES = {
    TaskKind.F: "F forward",
    TaskKind.B: "B backward",
    TaskKind.BI: "BI backward, inputs",
    TaskKind.BW: "BW backward, weights",
    TaskKind.R: "R recompute",
    TaskKind.NORM: "norm",
    TaskKind.UPDATE: "update",
    TaskKind.SEND_F: "send, receive",
    TaskKind.RECV_F: "send, receive",
    TaskKind.SEND_B: "send, receive",
    TaskKind.RECV_B: "send, receive",
    TaskKind.ALL_REDUCE: "all-reduce",
    TaskKind.REDUCE_SCATTER: "reduce-scatter",
    TaskKind.ALL_GATHER: "all-gather",
    TaskKind.ALL_TO_ALL: "all-to-all",
    TaskKind.RING_SHIFT: "ring shift",
    TaskKind.OFFLOAD: "host copy",
    TaskKind.RELOAD: "host copy",
}
IDLE = "#f1f3f5"
WIDTH_IN = 14.0
TEXT_IN = 0.12
MARGINS = Margins(left_in=0.95, right_in=0.72, top_in=0.62, bottom_in=0.9)
AXES_WIDTH_IN = WIDTH_IN - MARGINS.left_in - MARGINS.right_in
COMPUTE_HEIGHT, STREAM_HEIGHT, MEMORY_HEIGHT, RANK_GAP = 1.0, 0.24, 0.6, 0.3
SHARED_MEMORY_IN = 0.7
STATIC = (MemoryClass.PARAMETERS, MemoryClass.GRADIENTS, MemoryClass.OPTIMIZER)
MEMORY_COLOURS = {"static memory": "#b9c3cf", "other memory": "#7d91a8"}
NAMED_STREAMS = 8
MANY_BARS = 150
LIGHTEST = 0.45
BRIGHT = 0.6
"""Brightness from which on text on a colour is dark."""
GLYPH_EM = 0.64
PT_PER_IN = 72


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lane:
    track: RankTrack
    streams: tuple[int, ...]
    top: float
    height: float

    @property
    def is_compute(self) -> bool:
        return self.streams == (0,)

    @property
    def is_memory(self) -> bool:
        return not self.streams


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """What fills a memory lane, and where its limit is drawn (None: far away, or not known)."""

    full_bytes: int
    limit_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Canvas:
    """Axes with the window [begin, end) in `unit_ns`, and the height of a compute lane in inches."""

    axes: Axes
    begin: int
    end: int
    unit_ns: float
    lane_in: float

    @property
    def width(self) -> float:
        return (self.end - self.begin) / self.unit_ns


def plot_timeline(
    timeline: Timeline,
    path: str | Path,
    *,
    title: str | None = None,
    subtitle: str = "",
    limit_bytes: int | None = None,
) -> Path:
    """Draw the last step of `timeline`; returns the path.

    Args:
        timeline: whose last step.
        path: PNG or SVG by suffix.
        title, subtitle: above the picture.
        limit_bytes: what a device has for tensors: a line in every memory lane that comes near it.

    Raises: PlanError if `path` is neither PNG nor SVG, or cannot be written.
    """
    begin, end = timeline.window_ns
    unit_ns, unit = time_unit(end - begin)
    lanes = list(_lanes(timeline))
    bottom = lanes[-1].top + lanes[-1].height
    lane_in = _lane_in(len(timeline.tracks))
    height_in = bottom * lane_in + MARGINS.top_in + MARGINS.bottom_in
    with picture(path, width_in=WIDTH_IN, height_in=height_in) as figure:
        axes = figure.add_subplot()
        set_margins(figure, MARGINS)
        axes.set_xlim(0, max(end - begin, 1) / unit_ns)
        axes.set_ylim(bottom + 0.1, -0.1)
        canvas = _Canvas(axes=axes, begin=begin, end=end, unit_ns=unit_ns, lane_in=lane_in)
        shown: set[TaskKind] = set()
        peak = max(_peak_bytes(track) for track in timeline.tracks)
        limit = limit_near(peak, limit_bytes)
        scale = _Scale(full_bytes=max(peak, limit or 0), limit_bytes=limit)
        for lane in lanes:
            if lane.is_memory:
                _draw_memory(canvas, lane, window=timeline.window_ns, scale=scale)
            else:
                shown |= _draw_lane(canvas, lane)
        _label_lanes(canvas, lanes)
        axes.set_xlabel(f"time in the step ({unit})", fontsize=9)
        axes.tick_params(axis="x", labelsize=8, length=3)
        bare(axes)
        write_title(figure, title or _default_title(timeline), left_in=TEXT_IN, subtitle=subtitle)
        _write_legend(figure, shown, has_memory=peak > 0, limit=limit)
    return Path(path)


def _lane_in(num_tracks: int) -> float:
    """Return the height of a compute lane in inches: generous for few ranks, readable for 64."""
    return float(np.interp(num_tracks, [4, 8, 16, 64], [0.5, 0.4, 0.36, 0.17]))


def _lanes(timeline: Timeline) -> Iterator[_Lane]:
    """Yield lanes from the top: per rank its compute stream, the other streams that are used, its memory.

    With many ranks the other streams share one lane, and the memory of the fullest comes last.
    """
    many = len(timeline.tracks) > NAMED_STREAMS
    top = 0.0
    for track in timeline.tracks:
        yield _Lane(track=track, streams=(0,), top=top, height=COMPUTE_HEIGHT)
        top += COMPUTE_HEIGHT + 0.05
        others = tuple(sorted(set(track.stream.tolist()) - {0}))
        for streams in [others] if many else [(stream,) for stream in others]:
            yield _Lane(track=track, streams=streams, top=top, height=STREAM_HEIGHT)
            top += STREAM_HEIGHT + 0.03
        if not many and _peak_bytes(track):
            yield _Lane(track=track, streams=(), top=top, height=MEMORY_HEIGHT)
            top += MEMORY_HEIGHT
        top += RANK_GAP
    fullest = max(timeline.tracks, key=_peak_bytes)
    if many and _peak_bytes(fullest):
        height = SHARED_MEMORY_IN / _lane_in(len(timeline.tracks))
        yield _Lane(track=fullest, streams=(), top=top, height=height)


def _peak_bytes(track: RankTrack) -> int:
    return int(track.memory_bytes.sum(axis=1).max(initial=0))


def _draw_lane(canvas: _Canvas, lane: _Lane) -> set[TaskKind]:
    """Draw the spans of a lane and return the kinds that occur."""
    track = lane.track
    in_window = (track.end_ns > canvas.begin) & (track.start_ns < canvas.end)
    chosen = np.flatnonzero(np.isin(track.stream, lane.streams) & in_window)
    names: dict[int, TaskName] = {}
    bars_by_colour: dict[str, list[tuple[float, float]]] = {}
    run = _Run()
    starts = np.maximum(track.start_ns[chosen], canvas.begin).tolist()
    stops = np.minimum(track.end_ns[chosen], canvas.end).tolist()
    for task, start, stop in zip(track.task[chosen].tolist(), starts, stops, strict=True):
        if task not in names:
            names[task] = TaskName.parse(track.codes[task])
        name = names[task]
        bar = ((start - canvas.begin) / canvas.unit_ns, (stop - start) / canvas.unit_ns)
        colour = _colour(track, name)
        bars_by_colour.setdefault(colour, []).append(bar)
        if lane.is_compute and not run.grow(name, bar, colour):
            _label_run(canvas, lane, run)
            run = _Run.of(name, bar, colour)
    _label_run(canvas, lane, run)
    where = (lane.top, lane.height)
    canvas.axes.broken_barh([(0, canvas.width)], where, facecolor=IDLE, linewidth=0)
    line = 0.4 if not lane.is_compute or len(chosen) < MANY_BARS else 0.0
    for colour, bars in bars_by_colour.items():
        edge = (
            "white" if lane.is_compute else colour
        )  # else a message of microseconds is thinner than a pixel
        canvas.axes.broken_barh(bars, where, facecolor=colour, edgecolor=edge, linewidth=line)
    return {name.kind for name in names.values()}


@dataclass(slots=True)
class _Run:
    """Parts of one pass of a microbatch that follow one another on a lane: together they have one label."""

    key: tuple[int, int, int] | None = None
    microbatch: int = NONE
    begin: float = 0.0
    end: float = 0.0
    parts: int = 0
    colour: str = INK

    @classmethod
    def of(cls, name: TaskName, bar: tuple[float, float], colour: str) -> _Run:
        return cls(_key(name), name.microbatch, bar[0], bar[0] + bar[1], 1, colour)

    def grow(self, name: TaskName, bar: tuple[float, float], colour: str) -> bool:
        """Take one more part and return True, if it belongs to the same pass."""
        if self.key != _key(name):
            return False
        self.end, self.parts, self.colour = bar[0] + bar[1], self.parts + 1, colour
        return True


def _key(name: TaskName) -> tuple[int, int, int]:
    return int(name.kind), name.stage, name.microbatch


def _draw_memory(canvas: _Canvas, lane: _Lane, *, window: tuple[int, int], scale: _Scale) -> None:
    """Draw what a rank has allocated: what stays, and the rest above it."""
    times, by_class = window_curve(lane.track, window)
    x, floor = (times - canvas.begin) / canvas.unit_ns, lane.top + lane.height
    canvas.axes.broken_barh([(0, canvas.width)], (lane.top, lane.height), facecolor=IDLE, linewidth=0)
    stays = by_class[:, STATIC].sum(axis=1)
    lower = np.full(len(times), floor)
    for colour, held in zip(MEMORY_COLOURS.values(), (stays, by_class.sum(axis=1)), strict=True):
        upper = floor - lane.height * held / scale.full_bytes
        canvas.axes.fill_between(x, lower, upper, step="post", color=colour, linewidth=0)
        lower = upper
    if scale.limit_bytes is not None:
        at = floor - lane.height * scale.limit_bytes / scale.full_bytes
        canvas.axes.plot([0, canvas.width], [at, at], color=LIMIT, linewidth=0.9, linestyle=DASHED)


def _colour(track: RankTrack, name: TaskName) -> str:
    """Return the colour of a kind, lighter for the later stages of a rank that hosts several."""
    colour = COLOURS[name.kind]
    if name.stage not in track.stages or track.stages.index(name.stage) == 0:
        return colour
    share = LIGHTEST * track.stages.index(name.stage) / (len(track.stages) - 1)
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def _label_run(canvas: _Canvas, lane: _Lane, run: _Run) -> None:
    """Write the microbatch into a run that has room for it."""
    if run.microbatch == NONE:
        return
    text, size = str(run.microbatch), min(8.0, 0.6 * canvas.lane_in * PT_PER_IN)
    room_pt = (run.end - run.begin) / canvas.width * AXES_WIDTH_IN * PT_PER_IN
    if room_pt < size * (GLYPH_EM * len(text) + 0.2):
        return
    centre = ((run.begin + run.end) / 2, lane.top + lane.height / 2)
    dark = run.parts > 1 or _brightness(run.colour) > BRIGHT
    canvas.axes.text(
        *centre, text, ha="center", va="center_baseline", fontsize=size, color=INK if dark else "white"
    )


def _brightness(colour: str) -> float:
    """Return how bright a colour looks, 0 to 1 (ITU-R BT.601: weights of red, green and blue)."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue


def _label_lanes(canvas: _Canvas, lanes: list[_Lane]) -> None:
    """Name each rank at its compute lane; name the thin streams too where there is room."""
    axes = canvas.axes
    main = [lane for lane in lanes if lane.is_compute]
    size = min(9.0, 0.8 * canvas.lane_in * PT_PER_IN)
    axes.set_yticks([lane.top + lane.height / 2 for lane in main], [_rank_name(lane) for lane in main])
    axes.tick_params(axis="y", length=0, labelsize=size, labelcolor=INK)
    for lane in lanes:
        if lane.is_memory or (not lane.is_compute and len(main) <= NAMED_STREAMS):
            axes.annotate(
                _lane_name(lane, is_named=len(main) <= NAMED_STREAMS),
                (1, lane.top + lane.height / 2),
                xycoords=("axes fraction", "data"),
                xytext=(4, 0),
                textcoords="offset points",
                va="center_baseline",
                fontsize=min(6.0, 0.85 * lane.height * canvas.lane_in * PT_PER_IN),
                color=MUTED,
            )


def _lane_name(lane: _Lane, *, is_named: bool) -> str:
    """Return the stream, or the peak of memory; `is_named`: the rank is written beside it."""
    if not lane.is_memory:
        return lane.track.streams[lane.streams[0]]
    peak = _peak_bytes(lane.track)
    size, unit = size_unit(peak)
    text = f"peak {peak / size:.3g} {unit}"
    return text if is_named else f"{text}\nrank {lane.track.rank}"


def _rank_name(lane: _Lane) -> str:
    shared = f" (x{lane.track.n_devices})" if lane.track.n_devices > 1 else ""
    return f"rank {lane.track.rank}{shared}"


def _write_legend(figure: Figure, shown: set[TaskKind], *, has_memory: bool, limit: int | None) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {NAMES[kind]: COLOURS[kind] for kind in TaskKind if kind in shown}
    handles: list[Patch | Line2D] = [Patch(facecolor=colour, label=name) for name, colour in kinds.items()]
    memory = MEMORY_COLOURS if has_memory else {}
    handles += [Patch(facecolor=colour, label=name) for name, colour in memory.items()]
    if limit is not None:
        handles.append(Line2D([], [], color=LIMIT, linestyle=DASHED, linewidth=0.9, label=limit_name(limit)))
    handles.append(Patch(facecolor=IDLE, edgecolor="#c9ced4", linewidth=0.5, label="idle"))
    write_legend(figure, handles, left_in=TEXT_IN)


def _default_title(timeline: Timeline) -> str:
    return f"One step, {timeline.source}: {format_duration(timeline.step_time_ns)}"

"""Figures without global state: made on the Agg canvas, saved so that equal input gives equal bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator.errors import PlanError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METADATA: dict[str, dict[str, None]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
}
DPI = 160
INK = "#22262b"
MUTED = "#6b7280"
RULE = "#d5d9de"
LIMIT = "#b42318"
DASHED = (0, (4, 2))
HANDLE_IN, CHARACTER_IN = 0.36, 0.066
"""Room that an entry of a legend takes, and a character of its label, in inches."""
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "svg.hashsalt": "piper",
    "svg.fonttype": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": RULE,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.linewidth": 0.8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Margins:
    """Inches around the panels."""

    left_in: float
    right_in: float
    top_in: float
    bottom_in: float


@contextmanager
def picture(path: str | Path, *, width_in: float, height_in: float) -> Iterator[Figure]:
    """Give an empty figure, and write it to `path` (PNG or SVG by suffix) afterwards.

    Raises: PlanError for another suffix or a path that cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in METADATA:
        raise _error(target, "must end in .png or .svg", fix=f"write {target.stem or 'plot'}.png")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white")
        FigureCanvasAgg(figure)
        yield figure
        try:
            figure.savefig(target, format=suffix[1:], metadata=METADATA[suffix])
        except OSError as error:
            rule = f"cannot be written ({error.strerror})"
            raise _error(target, rule, fix="name a file in a folder that exists and is writable") from error


def set_margins(figure: Figure, margins: Margins, *, gap_in: tuple[float, float] = (0.0, 0.0)) -> None:
    """Place the panels inside `margins`; fixed, because a layout engine draws everything twice."""
    width, height = figure.get_size_inches().tolist()
    grid = figure.axes[0].get_gridspec() if figure.axes else None
    rows, columns = (1, 1) if grid is None else (grid.nrows, grid.ncols)
    panel_width = (width - margins.left_in - margins.right_in - (columns - 1) * gap_in[0]) / columns
    panel_height = (height - margins.top_in - margins.bottom_in - (rows - 1) * gap_in[1]) / rows
    figure.subplots_adjust(
        left=margins.left_in / width,
        right=1 - margins.right_in / width,
        top=1 - margins.top_in / height,
        bottom=margins.bottom_in / height,
        wspace=gap_in[0] / panel_width,
        hspace=gap_in[1] / panel_height,
    )


def write_title(figure: Figure, title: str, *, left_in: float, subtitle: str = "") -> None:
    """Write the title at the top left, and below it, smaller, what goes with it."""
    width, height = figure.get_size_inches().tolist()
    figure.text(left_in / width, 1 - 0.1 / height, title, fontsize=12, fontweight="bold", va="top")
    figure.text(left_in / width, 1 - 0.34 / height, subtitle, fontsize=8.5, color=MUTED, va="top")


def write_legend(figure: Figure, handles: Sequence[Artist], *, left_in: float) -> None:
    """Write a legend at the bottom left, in one line or, where that is too long, in two."""
    width, height = figure.get_size_inches().tolist()
    needed_in = sum(HANDLE_IN + CHARACTER_IN * len(str(handle.get_label())) for handle in handles)
    lines = 1 if needed_in < width else 2
    figure.legend(
        handles=list(handles), loc="lower left", bbox_to_anchor=(left_in / width, 0.04 / height),
        ncols=-(-len(handles) // lines), fontsize=8, frameon=False, handlelength=1.2, handleheight=0.9,
        columnspacing=1.4, borderaxespad=0.0, borderpad=0.2,
    )  # fmt: skip


def bare(axes: Axes, *, keep: tuple[str, ...] = ("bottom",)) -> None:
    """Remove the frame of `axes` but for the sides in `keep`."""
    for side, spine in axes.spines.items():
        spine.set_visible(side in keep)


def time_unit(span_ns: int) -> tuple[float, str]:
    """Return (ns per unit, unit) in which a span of this length reads well."""
    for unit_ns, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "us")):
        if span_ns >= unit_ns:
            return unit_ns, unit
    return 1.0, "ns"


def _error(path: Path, rule: str, *, fix: str) -> PlanError:
    return PlanError(where="plot", field="path", value=str(path), rule=rule, fix=fix)

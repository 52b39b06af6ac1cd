"""Figures without global state: made on the Agg canvas, saved so that equal input gives equal bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator.errors import PlanError

if TYPE_CHECKING:
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
        figure = Figure(figsize=(width_in, height_in), dpi=DPI, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        yield figure
        try:
            figure.savefig(target, format=suffix[1:], metadata=METADATA[suffix])
        except OSError as error:
            rule = f"cannot be written ({error.strerror})"
            raise _error(target, rule, fix="name a file in a folder that exists and is writable") from error


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

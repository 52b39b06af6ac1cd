"""A page with the score of every source, and a scatter plot of predicted against measured step times."""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from piper.validation.predictions import RowPrediction

_COLUMNS = ("n", "n_time", "mape", "median_ape", "p90_ape", "bias", "memory_mape", "band_coverage")
_TWICE = (0.5, 2.0)
_STYLE = "body{font:14px sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:right}svg{max-width:30em}"


def write_report(path: Path, predictions: Sequence[RowPrediction], result: dict[str, Any]) -> None:
    """Write the page to `path`; `result` is that of `scores`."""
    plots = "\n".join(
        f"<h2>{escape(name)}</h2>{_scatter([p for p in predictions if p.row.file == name])}"
        for name, score in result["by_source"].items()
        if score["n_time"]
    )
    path.write_text(
        f"<!doctype html><meta charset=utf-8><title>Published runs</title><style>{_STYLE}</style>"
        f"<h1>Predicted and measured</h1>{_table(result)}{plots}",
        encoding="utf-8",
    )


def _table(result: dict[str, Any]) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("source", *_COLUMNS))
    rows = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{_figure(score[key])}</td>' for key in _COLUMNS)}</tr>"
        for name, score in [*result["by_source"].items(), ("all", result["overall"])]
    )
    return f"<table><tr>{head}</tr>{rows}</table>"


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{100 * value:.1f} %"


def _scatter(predictions: Sequence[RowPrediction]) -> str:
    """Return an SVG: each run a point, the line of equality, and those of twice and half; log axes."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    points = [(p.measured_s, p.predicted_s) for p in predictions if p.error is not None]
    figure, axes = plt.subplots(figsize=(4.5, 4.5), layout="constrained")
    axes.loglog([m for m, _ in points], [p for _, p in points], ".", markersize=4, alpha=0.6)
    low = min(value for point in points for value in point if value) * 0.8
    high = max(value for point in points for value in point if value) * 1.25
    axes.plot([low, high], [low, high], color="black", linewidth=0.8)
    for factor in _TWICE:
        axes.plot([low, high], [low * factor, high * factor], color="gray", linewidth=0.5, linestyle=":")
    axes.set(xlim=(low, high), ylim=(low, high), xlabel="measured step time, s", ylabel="predicted, s")
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    plt.close(figure)
    return text.getvalue().partition("<svg")[1] + text.getvalue().partition("<svg")[2]

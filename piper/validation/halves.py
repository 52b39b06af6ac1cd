"""Swapped parameters: the runs of each half are predicted with what was fitted to the other half."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from cost_models.yaml_file import read_yaml
from piper.validation.overlay import Overlay
from piper.validation.predictions import RowPrediction, predict_rows
from piper.validation.rows import PublishedRow

FITTED = Path(__file__).parent / "fitted"
"""fit_a.yaml and fit_b.yaml: parameters fitted to the runs of one half (`benchmarks/fit_parameters.py`)."""

_OTHER = {"a": "b", "b": "a"}


def fitted_to(half: str) -> Overlay:
    """Return the parameters that were fitted to the runs of half "a" or "b"."""
    content = read_yaml(FITTED / f"fit_{half}.yaml")
    return tuple(content["parameters"].items())


def predict_halves(
    rows: Sequence[PublishedRow],
    *,
    stack: str = "auto",
    jobs: int | None = None,
    report: Callable[[int, int], object] = lambda *_: None,
) -> list[RowPrediction]:
    """Return a prediction for every row, in order, by the fit that has not seen it."""
    found: dict[str, RowPrediction] = {}
    for half, other in _OTHER.items():
        listed = [row for row in rows if row.half == half]
        before = len(found)

        def told(done: int, _: int, before: int = before) -> None:
            report(before + done, len(rows))

        predicted = predict_rows(listed, stack=stack, parameters=fitted_to(other), jobs=jobs, report=told)
        found |= {prediction.row.case_id: prediction for prediction in predicted}
    return [found[row.case_id] for row in rows]

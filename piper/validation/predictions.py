"""Jobs of published runs -> predictions, on several processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from cost_models.errors import InputError
from piper.predict import predict
from piper.validation.jobs_of_rows import RowJob, job_of_row
from piper.validation.overlay import Overlay, overlaid
from piper.validation.rows import PublishedRow
from piper.validation.stacks import PRINTED_MEMORY
from piper.workbench import Workbench

TOLERANCE = 1e-3
"""Largest relative error of a step time that is predicted from fewer microbatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPrediction:
    """What is predicted for a run, beside what was measured.

    Args:
        row: the run.
        stack: with which it was predicted; "" where it was skipped before that was known.
        assumed: fields that the row leaves open.
        predicted_s, low_s, high_s: of a step, with its band; None: skipped.
        predicted_bytes: peak memory, as reports with this stack mean it; None: skipped.
        fits: into the memory of a device; None: skipped.
        measured_s, measured_bytes: as published, or None.
        reason: why it was skipped, or "".
    """

    row: PublishedRow
    stack: str = ""
    assumed: tuple[str, ...] = ()
    predicted_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    predicted_bytes: float | None = None
    fits: bool | None = None
    measured_s: float | None = None
    measured_bytes: float | None = None
    reason: str = ""

    @property
    def error(self) -> float | None:
        """Return predicted / measured - 1 of the step time, or None."""
        if self.predicted_s is None or self.measured_s is None:
            return None
        return self.predicted_s / self.measured_s - 1


def predict_rows(
    rows: Sequence[PublishedRow],
    *,
    stack: str = "auto",
    parameters: Overlay = (),
    jobs: int | None = None,
    report: Callable[[int, int], object] = lambda *_: None,
) -> list[RowPrediction]:
    """Return a prediction for every row, in order.

    Args:
        rows: published runs.
        stack: name or file, or "auto".
        parameters: figures of the catalogue to change (`piper.validation.overlay`).
        jobs: processes, or None: one per core.
        report: called with (rows done, all rows).
    """
    count = min(jobs or os.cpu_count() or 1, len(rows) or 1)
    work = partial(predict_row, stack=stack, parameters=parameters)
    found: list[RowPrediction] = []
    # Neighbouring rows share captures and prices: a process takes them together.
    with ProcessPoolExecutor(count) as pool:
        listed = map(work, rows) if count == 1 else pool.map(work, rows, chunksize=8)
        for prediction in listed:
            found.append(prediction)
            report(len(found), len(rows))
    return found


def predict_row(row: PublishedRow, *, stack: str = "auto", parameters: Overlay = ()) -> RowPrediction:
    """Return the prediction for one run; what cannot be predicted is skipped with its reason."""
    try:
        with overlaid(parameters):
            row_job = job_of_row(row, stack=stack)
            return _predicted(row_job, bench=_bench(repr(parameters)))
    except InputError as problem:
        return RowPrediction(row=row, reason=f"{problem.field}: {problem.rule}")


@cache
def _bench(parameters: str) -> Workbench:
    """Return what the rows of a process share under the same parameters."""
    del parameters
    return Workbench()


def _predicted(row_job: RowJob, *, bench: Workbench) -> RowPrediction:
    job = row_job.job
    result = predict(job, microbatches="auto", tolerance=TOLERANCE, verified=False, bench=bench).result
    band = result["error_band"]
    return RowPrediction(
        row=row_job.row,
        stack=row_job.job.stack,
        assumed=row_job.assumed,
        predicted_s=result["step_time_s"],
        low_s=band["step_time_low_s"],
        high_s=band["step_time_high_s"],
        predicted_bytes=_printed_bytes(result, stack=str(row_job.job.stack)),
        fits=result["fits"],
        measured_s=row_job.measured_s,
        measured_bytes=row_job.measured_bytes,
    )


def _printed_bytes(result: dict[str, Any], *, stack: str) -> float:
    """Return the memory that reports with a stack print."""
    match PRINTED_MEMORY.get(stack, "allocated"):
        case "reserved":
            return float(result["peak_reserved_bytes"])
        case "needed":
            return float(result["needed_memory_bytes"])
        case "first":
            first = result["ranks"][0]["peak_memory_bytes"]
            others = result["needed_memory_bytes"] - result["peak_reserved_bytes"]
            return float(first + others)
        case _:
            return float(result["peak_memory_bytes"])

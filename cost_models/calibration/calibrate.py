"""Rows + the nearest cluster of the catalogue -> the content of a cluster file, and its errors.

[Note: rows held out]
Of kernels and communication every fifth case, chosen by a hash of what was measured, takes no part in the
fit; the errors that are reported, and the bands of the file, are those of these rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cost_models.calibration.device import device_groups, device_times_s, fit_device
from cost_models.calibration.fit import overlaid
from cost_models.calibration.host import fit_host
from cost_models.calibration.network import fit_network, inside_node, network_times_s
from cost_models.calibration.operation import MEASURED
from cost_models.calibration.table import COLLECTIVES, Measurement
from cost_models.catalogue import cluster_content
from cost_models.errors import CostModelError

Content = dict[str, Any]
_HELD_OUT_OF = 5
_LEAST_ERROR, _MOST_ERROR = 0.02, 0.95
_BAND = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class RowError:
    """How far off predictions of one kind of rows are: |predicted / measured - 1|.

    Args:
        op: of the rows.
        fitted, held_out: how many rows.
        median, p90: over the rows held out; over those fitted where none was held out.
    """

    op: str
    fitted: int
    held_out: int
    median: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was fitted.

    Args:
        content: of a cluster file, its device in `gpu`.
        errors: by kind of rows.
        base: the cluster that figures are taken from which no row tells.
        device: that was measured.
        unused: rows that tell nothing about the file (communication between nodes).
    """

    content: Content
    errors: tuple[RowError, ...]
    base: str
    device: str
    unused: int


def calibrate(
    rows: Sequence[Measurement],
    *,
    base: str,
    name: str,
    stack: str = "piper",
    report: Callable[[str], object] = lambda _: None,
) -> Calibration:
    """Fit a cluster file to rows.

    Args:
        rows: of one device.
        base: cluster that figures are taken from which no row tells.
        name: of the new cluster.
        stack: whose runtime made the passes in the rows.
        report: called with what is being done.
    Raises: CostModelError for no rows, rows of several devices, an unknown cluster.
    """
    device = _one_device(rows)
    kept = [row for row in rows if not is_held_out(row)]
    content = cluster_content(base)
    versions = sorted({row.versions for row in rows})
    source = f"Fitted to {len(kept)} measurements of {device} ({', '.join(versions)}) by piper calibrate"
    content["gpu"], sections = fit_device(content["gpu"], kept, report=report)
    report("fitting communication and host")
    content = fit_network(content, kept)
    content = fit_host(content, kept, stack=stack, source=source)
    errors, unused = _errors(content, rows)
    content = _with_errors(content, errors, sections)
    named = {"name": name, "description": f"{device}, measured; what was not, as {base}"}
    content |= named | {"source": f"{content['source']} {source}"}
    content["gpu"] |= {"name": f"{name}-device", "description": f"{device}, measured"}
    communicates = any(error.op in COLLECTIVES for error in errors)
    content = _with_sources(content, sections, source=source, communicates=communicates)
    return Calibration(content=content, errors=tuple(errors), base=base, device=device, unused=unused)


def is_held_out(row: Measurement) -> bool:
    """Tell whether a row takes no part in the fit; see [Note: rows held out]."""
    if row.op not in MEASURED and row.op not in COLLECTIVES:
        return False
    return hashlib.sha256(row.case.encode()).digest()[0] % _HELD_OUT_OF == 0


def _one_device(rows: Sequence[Measurement]) -> str:
    devices = sorted({row.device for row in rows})
    if len(devices) != 1:
        raise CostModelError(
            where="TABLE",
            field="device",
            value=", ".join(devices) or "no rows",
            rule="must be one device",
            fix="calibrate a table of `piper profile`, or several of the same device",
        )
    return devices[0]


def _errors(content: Content, rows: Sequence[Measurement]) -> tuple[list[RowError], int]:
    kernels = [row for row in rows if row.op in MEASURED]
    near = inside_node(content, rows)
    predicted = device_times_s(content["gpu"], kernels) + network_times_s(content, near)
    off: dict[str, list[tuple[bool, float]]] = {}
    for row, seconds in zip([*kernels, *near], predicted, strict=True):
        off.setdefault(row.op, []).append((is_held_out(row), abs(seconds / row.time_s - 1)))
    found = []
    for op, both in off.items():
        held = [error for out, error in both if out]
        judged = held or [error for _, error in both]
        found.append(
            RowError(
                op=op,
                fitted=len(both) - len(held),
                held_out=len(held),
                median=float(np.median(judged)),
                p90=float(np.quantile(judged, _BAND)),
            )
        )
    return found, sum(row.op in COLLECTIVES for row in rows) - len(near)


def _with_errors(content: Content, errors: list[RowError], sections: list[str]) -> Content:
    """Write the errors into the sections that they are about."""
    by_op = {error.op: min(max(error.p90, _LEAST_ERROR), _MOST_ERROR) for error in errors}
    values: dict[str, Any] = {}
    for group in device_groups(content["gpu"]):
        mine = [by_op[op] for op in group.ops if op in by_op]
        if mine and group.section in sections:
            values[f"gpu.{group.section}.error"] = round(max(mine), 3)
    for op in COLLECTIVES:
        if op in by_op:
            values[f"intra_collectives.{op}.error"] = round(by_op[op], 3)
    return overlaid(content, values)


def _with_sources(content: Content, sections: list[str], *, source: str, communicates: bool) -> Content:
    """Say in every section that was fitted that it was."""
    values: dict[str, Any] = {}
    for section in sections:
        values[f"gpu.{section}.source"] = source
        if "provenance" in content["gpu"][section]:
            values[f"gpu.{section}.provenance"] = "fitted"
    if not content["gpu"]["chip"]["asynchronous"]:
        for section in ("peak", "memory"):
            values[f"gpu.{section}.source"] = (
                f"{source}; [Note: peaks of a CPU] in its code. {_of(content, section)}"
            )
    if communicates:
        values |= {f"{section}.source": source for section in ("intra", "intra_collectives")}
        values["intra_collectives.provenance"] = "fitted"
    for section in ("matmul", "attention"):
        if section in sections:
            values[f"gpu.{section}.fitted_dtypes"] = sorted(content["gpu"]["peak"].keys() & {"fp32", "bf16"})
    return overlaid(content, values)


def _of(content: Content, section: str) -> str:
    return f"Other figures: {content['gpu'][section]['source']}"

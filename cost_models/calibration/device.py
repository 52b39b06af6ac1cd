"""Rows of kernels -> figures of a device: which figures each kind of kernel tells.

[Note: peaks of a CPU]
A CPU comes without a datasheet that tells what one process gets of it. Its peak is what the fastest measured
multiplication reaches, its bandwidth what the fastest kernel moves, caches included; efficiencies are shares
of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cost_models.calibration.fit import SURE, Parameter, fit, overlaid
from cost_models.calibration.operation import MEASURED, operation_of
from cost_models.calibration.table import Measurement
from cost_models.models.roofline import Roofline
from cost_models.ops import DTYPE_BYTES, OpKind
from cost_models.read_gpu import BANDWIDTH_BOUND, read_gpu
from cost_models.units import Dimension, parse_quantity

Content = dict[str, Any]
Values = dict[str, str | float]
_SHARE = {"low": 0.01, "high": 1.0}
_LATENCY = {"low": 5e-8, "high": 1e-3, "unit": "us", "scale": 1e-6}
_MOST_PEAK = 1.05
"""Peak of a CPU over the fastest measured rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Figures of one section of the file that are fitted together.

    Args:
        section: of the file.
        ops: kinds of rows that tell them.
        keys: dotted keys of the figures, with bounds, unit and prior as in `Parameter`.
    """

    section: str
    ops: tuple[str, ...]
    keys: Mapping[str, Mapping[str, Any]]


def device_groups(content: Content) -> list[Group]:
    """Return the groups of a device's file."""
    kernel = f"attention.kernels.{content['attention']['best']}"
    moving = tuple(kind.value for kind in BANDWIDTH_BOUND)
    return [
        Group(
            section="matmul",
            ops=("matmul",),
            keys={
                "matmul.efficiency": _SHARE,
                "matmul.batched_efficiency": _SHARE,
                "matmul.bandwidth_fraction": _SHARE,
                "matmul.latency": _LATENCY,
                "matmul.wgrad_slowdown": {"low": 0.5, "high": 2.0, "sigma": SURE},
            },
        ),
        Group(
            section="attention",
            ops=("attention",),
            keys={
                f"{kernel}.efficiency": _SHARE,
                f"{kernel}.half_length": {"low": 1.0, "high": 5000.0},
                f"{kernel}.backward_ratio": {"low": 1.0, "high": 6.0, "sigma": SURE},
                f"{kernel}.head64_factor": {"low": 0.3, "high": 1.0, "sigma": SURE},
                "attention.latency": _LATENCY,
            },
        ),
        Group(
            section="bandwidth_bound",
            ops=moving,
            keys={f"bandwidth_bound.{kind}": _SHARE for kind in moving}
            | {"bandwidth_bound.latency": _LATENCY},
        ),
    ]


def device_times_s(content: Content, rows: Sequence[Measurement]) -> list[float]:
    """Return the predicted time of rows of kernels on the device of a file."""
    roofline = Roofline(read_gpu(content, where="calibration"))
    return [roofline.operation(operation_of(row)).seconds for row in rows]


def fit_device(
    content: Content, rows: Sequence[Measurement], *, report: Callable[[str], object]
) -> tuple[Content, list[str]]:
    """Return the file's content with the figures that `rows` tell, and the sections that were fitted."""
    chosen = [row for row in rows if row.op in MEASURED]
    if not content["chip"]["asynchronous"]:
        content = overlaid(content, _peaks(chosen))
    fitted = []
    for group in device_groups(content):
        mine = [row for row in chosen if row.op in group.ops]
        told = {row.op for row in mine}
        keys = [key for key in group.keys if _is_told(key, group, told) and _plain(content, key) is not None]
        if not mine:
            continue
        report(f"fitting {group.section} to {len(mine)} rows")
        parameters = [_parameter(content, key, group.keys[key]) for key in keys]
        operations = [operation_of(row) for row in mine]
        base = content

        def predict(values: Values, base: Content = base, operations: list[Any] = operations) -> list[float]:
            roofline = Roofline(read_gpu(overlaid(base, values), where="calibration"))
            return [roofline.operation(operation).seconds for operation in operations]

        content = overlaid(content, fit(parameters, predict, [row.time_s for row in mine]))
        fitted.append(group.section)
    return content, fitted


def _is_told(key: str, group: Group, told: set[str]) -> bool:
    """Tell whether rows say something about a figure: a share by kind needs rows of that kind."""
    name = key.rpartition(".")[2]
    return name not in group.ops or name in told


def _parameter(content: Content, key: str, limits: Mapping[str, Any]) -> Parameter:
    value = _plain(content, key)
    prior = float(value) if "unit" not in limits else _seconds(value, key)
    return Parameter(key=key, prior=min(max(prior, limits["low"]), limits["high"]), **limits)


def _seconds(value: object, key: str) -> float:
    return parse_quantity(value, Dimension.SECONDS, where="calibration", field=key, zero_ok=True)


def _plain(content: Content, key: str) -> Any:
    """Return the value at a dotted key, None where the file has none."""
    found: Any = content
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return None if isinstance(found, dict) else found


def _peaks(rows: Sequence[Measurement]) -> Values:
    """Return peak and bandwidth of a CPU; [Note: peaks of a CPU]."""
    operations = [(operation_of(row), row.time_s) for row in rows]
    found: Values = {}
    for dtype in sorted({op.dtype for op, _ in operations} & set(DTYPE_BYTES)):
        rates = [op.flops / s for op, s in operations if op.kind is OpKind.MATMUL and op.dtype == dtype]
        if rates:
            found[f"peak.{dtype}"] = f"{_MOST_PEAK * max(rates) / 1e12:.4g}TFLOP/s"
    moving = [op.bytes / s for op, s in operations if op.kind in BANDWIDTH_BOUND]
    if moving:
        found["memory.bandwidth"] = f"{_MOST_PEAK * max(moving) / 1e9:.4g}GB/s"
    return found

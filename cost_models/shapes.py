"""Kernels that a training harness measured: prices of their shapes, and of shapes near them.

[Note: measured shapes]
A row of `tables/` says how long a shape takes beside the roofline: its ratio, over the median ratio of all
rows of its GPU and harness. A price is the roofline of the GPU's file times the ratio of the same shape, else
a mean of those of the same direction whose sizes differ by less than a factor of 2 altogether (the sum of
|log2|): weights fall with the square of the distance, and half a row of ratio 1 takes part, so that one far
neighbour says little. The level is the GPU's, because training is slower than what a harness measures (clocks
and power): the training derate of the GPU beside a harness. The shape is the table's.

[Note: who is believed]
Only rows of training harnesses price. Rows of others were tried on these: ratios of the inference collector
make the median error on Transformer Engine's matmuls larger (B200 4.1 -> 8.4 %, A100 2.1 -> 2.4 %, on Vidur's
5.5 -> 9.1 %), those of Vidur too (A100 2.3 -> 4.5 %). They are there to be predicted by
`benchmarks/accuracy.py`.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from cost_models.models.roofline import Kernel, Roofline
from cost_models.ops import DTYPE_BYTES, Operation, OpKind
from cost_models.price import Price, Provenance
from cost_models.tables import HARNESSES, TABLES
from cost_models.use import OperationUse

EXACT_ERROR = 0.1
"""90th percentile of how two measurements of a shape differ: 10 to 25 % over inference frameworks on H100 and
B200, .8 % (median) on A100 (collections of ai-dynamo/aiconfigurator)."""

_RADIUS = 1.0
_NEAREST = 0.1
_DOUBT = 0.5
"""Sum of |log2| up to which a row is a neighbour, least distance that counts, weight of ratio 1; found on
rows held out: a radius of 2 and more doubt are worse."""

_DTYPES = frozenset({"bf16", "fp16"})
_BACKWARD_FLOPS = 2.5
"""FLOPs of a fused attention backward over its forward (Dao 2023, arXiv 2307.08691)."""

_Family = tuple[OpKind, str, int]
_Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One measured kernel."""

    operation: Operation
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Time over the roofline's; `exact` for a shape that was measured itself."""

    value: float
    exact: bool


class MeasuredShapes:
    """Ratios of measured kernels to a roofline; see [Note: measured shapes].

    Args:
        measured: of one GPU, harness and kind.
        roofline: of that GPU.

    `level` is the time of the harness over the roofline's: 1 / level is the training derate of the GPU's file
    beside that harness.
    """

    def __init__(self, measured: Sequence[Measurement], *, roofline: Roofline) -> None:
        ratios = [m.seconds / roofline.operation(m.operation).seconds for m in measured]
        self.level = statistics.median(ratios)
        self._ratios: dict[_Family, dict[_Sizes, float]] = defaultdict(dict)
        for measurement, ratio in zip(measured, ratios, strict=True):
            family, sizes = _place(measurement.operation)
            self._ratios[family][sizes] = math.log(ratio / self.level)

    def ratio(self, operation: Operation) -> Ratio | None:
        """Return how an operation compares with the roofline, None where nothing near was measured."""
        if not _is_like_measured(operation):
            return None
        family, sizes = _place(operation)
        known = self._ratios.get(family, {})
        if sizes in known:
            return Ratio(value=math.exp(known[sizes]), exact=True)
        weight, total = 0.0, 0.0
        for other, ratio in known.items():
            distance = sum(abs(math.log2(a / b)) for a, b in zip(sizes, other, strict=True))
            if distance <= _RADIUS:
                share = 1 / max(distance, _NEAREST) ** 2
                weight, total = weight + share, total + share * ratio
        return Ratio(value=math.exp(total / (weight + _DOUBT)), exact=False) if weight else None


class MeasuredRoofline:
    """A roofline that knows measured shapes of its GPU, with the interface of `Roofline`."""

    def __init__(self, roofline: Roofline) -> None:
        self._roofline = roofline
        gpu, plain = roofline.gpu, Roofline(roofline.gpu)
        self._shapes: dict[OpKind, MeasuredShapes] = {}
        for (harness, kind), found in measurements(gpu.name).items():
            other_kernel = kind is OpKind.ATTENTION and roofline.attention_kernel != plain.attention_kernel
            if HARNESSES[harness].training and not other_kernel:
                self._shapes[kind] = MeasuredShapes(found, roofline=plain)

    def operation(self, operation: Operation) -> Price:
        """Price one kernel (not `count` of them); raises as `Roofline.alone`."""
        return self.alone(operation).price()

    def operation_use(self, operation: Operation) -> OperationUse:
        """Return what bounds one kernel; raises as `Roofline.alone`."""
        return self.alone(operation).use(operation)

    def alone(self, operation: Operation) -> Kernel:
        """Return the time of one kernel and what bounds it; raises as `Roofline.alone`."""
        kernel = self._roofline.alone(operation)
        shapes = self._shapes.get(operation.kind)
        ratio = shapes.ratio(operation) if shapes else None
        if ratio is None:
            return kernel
        return replace(
            kernel,
            processor_s=kernel.processor_s * ratio.value,
            memory_s=kernel.memory_s * ratio.value,
            latency_s=kernel.latency_s * ratio.value,
            error=min(kernel.error, EXACT_ERROR) if ratio.exact else kernel.error,
            provenance=Provenance.MEASURED if ratio.exact else Provenance.INTERPOLATED,
        )


@cache
def measurements(gpu: str) -> Mapping[tuple[str, OpKind], tuple[Measurement, ...]]:
    """Return the measured kernels of a GPU, by harness and kind."""
    found: dict[tuple[str, OpKind], list[Measurement]] = defaultdict(list)
    for name, file in TABLES.items():
        text = (Path(__file__).parent / "tables" / file).read_text(encoding="utf-8")
        head, *lines = text.splitlines()
        for row in csv.DictReader([head, *(line for line in lines if line.startswith(f"{gpu},"))]):
            operation = _matmul(row) if name == "matmul" else _attention(row)
            seconds = float(row["time_us"]) * 1e-6
            measurement = Measurement(operation=operation, seconds=seconds)
            found[row["source"], operation.kind].append(measurement)
    return {key: tuple(rows) for key, rows in found.items()}


def halves(rows: Iterable[Measurement]) -> tuple[list[Measurement], list[Measurement]]:
    """Cut measurements into two halves, to test each on the other: odd and even ones in order of shape."""
    ordered = sorted(rows, key=lambda row: (row.operation.direction, row.operation.shape))
    return ordered[::2], ordered[1::2]


def _place(operation: Operation) -> tuple[_Family, _Sizes]:
    """Return what shapes must have in common, and the sizes that may differ."""
    if operation.kind is OpKind.ATTENTION:
        batch, heads, _, seq, _, head_dim = operation.shape
        way = "fwd" if operation.direction == "fwd" else "bwd"
        return (operation.kind, way, head_dim), (batch * heads, seq)
    return (operation.kind, operation.direction, operation.shape[0]), operation.shape[1:]


def _is_like_measured(operation: Operation) -> bool:
    if operation.dtype not in _DTYPES:
        return False
    if operation.kind is OpKind.ATTENTION:
        return operation.causal and operation.shape[3] == operation.shape[4]
    return operation.kind is OpKind.MATMUL


def _matmul(row: Mapping[str, str]) -> Operation:
    m, n, k = (int(row[name]) for name in "mnk")
    return Operation(
        kind=OpKind.MATMUL,
        name="measured",
        shape=(1, m, n, k),
        dtype="fp16" if row["gpu"].startswith("v100") else "bf16",
        flops=2 * m * n * k,
        bytes=DTYPE_BYTES["bf16"] * (m * k + k * n + m * n),
        direction=row["direction"],
    )


def _attention(row: Mapping[str, str]) -> Operation:
    batch, heads, kv_heads = (int(row[name]) for name in ("batch", "heads", "kv_heads"))
    seq, head_dim, backward = int(row["seq"]), int(row["head_dim"]), row["direction"] != "fwd"
    forward_flops = 2 * batch * heads * seq * seq * head_dim
    return Operation(
        kind=OpKind.ATTENTION,
        name="measured",
        shape=(batch, heads, kv_heads, seq, seq, head_dim),
        dtype="bf16",
        flops=round(forward_flops * _BACKWARD_FLOPS) if backward else forward_flops,
        bytes=4 * batch * (heads + kv_heads) * seq * head_dim,
        causal=True,
        direction=row["direction"],
    )

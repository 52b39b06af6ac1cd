"""Tables of measurements: CSV files that `piper profile` writes and `piper calibrate` reads.

[Note: columns of a table]
device     name of the device, as its driver gives it (a CPU: the name of the processor)
op         a kind of operation (`OpKind`), a collective (`CollectiveKind`), `transfer`, `contention`,
           `launch`, `pass` or `message`
kernel     which kernel of that kind, such as add or silu
dtype      compute dtype
shape      sizes joined by x. Operations: as in `OpKind`; collectives and transfers: bytes (nccl-tests
           convention, see `CollectiveKind`); contention: rounds of a fixed mixture of kernels; launch:
           kernels; pass: kernels, their FLOPs, their bytes; message: bytes
direction  fwd, dgrad, wgrad or bwd
ranks      processes that take part (collectives), or do the same at once (contention)
time_us    median time of one, in microseconds; where processes wait for each other, the mean without the
           longest quarter
repeats    how many samples the median is of
spread     distance of the quartiles of the samples over their median
versions   of torch and of the communication library
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cost_models.documents import UnreadableError, read_text
from cost_models.errors import CostModelError, nearest, whole_number
from cost_models.ops import DTYPE_BYTES, OpKind
from cost_models.price import CollectiveKind

HEADER = (
    "device", "op", "kernel", "dtype", "shape", "direction", "ranks", "time_us", "repeats", "spread",
    "versions",
)  # fmt: skip
TRANSFER, CONTENTION, LAUNCH, PASS, MESSAGE = "transfer", "contention", "launch", "pass", "message"
COLLECTIVES = (*(kind.value for kind in CollectiveKind if kind is not CollectiveKind.RING_SHIFT), TRANSFER)
OPS = (
    *(kind.value for kind in OpKind if kind is not OpKind.FIXED),
    *COLLECTIVES,
    CONTENTION,
    LAUNCH,
    PASS,
    MESSAGE,
)
DIRECTIONS = ("fwd", "dgrad", "wgrad", "bwd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One row; see [Note: columns of a table]."""

    device: str
    op: str
    kernel: str
    dtype: str
    shape: tuple[int, ...]
    direction: str
    ranks: int
    time_s: float
    repeats: int
    spread: float
    versions: str

    @property
    def case(self) -> str:
        """Return what was measured, without the result: equal for repeated measurements."""
        shape = "x".join(map(str, self.shape))
        return "|".join((self.op, self.kernel, self.dtype, shape, self.direction, str(self.ranks)))


def write_table(path: Path, rows: Iterable[Measurement]) -> None:
    """Write rows as CSV with the columns of `HEADER`; raises OSError."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    for row in rows:
        shape = "x".join(map(str, row.shape))
        fields = (row.device, row.op, row.kernel, row.dtype, shape, row.direction, row.ranks)
        writer.writerow([*fields, f"{row.time_s * 1e6:.4f}", row.repeats, f"{row.spread:.4f}", row.versions])
    path.write_text(text.getvalue(), encoding="utf-8")


def read_table(path: str | Path) -> list[Measurement]:
    """Return the rows of a table; raises CostModelError naming file, line and column."""
    try:
        text = read_text(Path(path))
    except UnreadableError as problem:
        raise CostModelError(
            where=problem.place(str(path)),
            field="TABLE",
            value=str(path),
            rule=problem.rule,
            fix="give a CSV file that `piper profile` wrote",
        ) from None
    reader = csv.DictReader(io.StringIO(text))
    lacking = [name for name in HEADER if name not in (reader.fieldnames or ())]
    if lacking:
        raise CostModelError(
            where=f"{path}:1",
            field="header",
            value=", ".join(reader.fieldnames or ()),
            rule=f"lacks {', '.join(lacking)}",
            fix=f"begin with {','.join(HEADER)}",
        )
    return [_row(_Fields(fields, where=f"{path}:{reader.line_num}")) for fields in reader]


class _Fields:
    """One line of a table, read field by field."""

    def __init__(self, fields: dict[str, str], *, where: str) -> None:
        self._fields = fields
        self._where = where

    def text(self, name: str) -> str:
        return (self._fields[name] or "").strip()

    def one_of(self, name: str, known: Iterable[str]) -> str:
        value, names = self.text(name), tuple(known)
        if value not in names:
            raise self._error(name, f"is not known; {nearest(value, names)}")
        return value

    def whole(self, name: str) -> int:
        return self._whole(name, self.text(name))

    def sizes(self, name: str) -> tuple[int, ...]:
        return tuple(self._whole(name, part) for part in self.text(name).split("x"))

    def positive(self, name: str, *, zero_ok: bool = False) -> float:
        try:
            value = float(self.text(name))
        except ValueError:
            value = math.nan
        if not (value > 0 or (zero_ok and value == 0)) or not math.isfinite(value):
            raise self._error(name, "must be a number >= 0" if zero_ok else "must be a number > 0")
        return value

    def _whole(self, name: str, text: str) -> int:
        number = whole_number(text)
        if number is None or number < 1:
            raise self._error(name, "must be whole numbers >= 1")
        return number

    def _error(self, name: str, rule: str) -> CostModelError:
        fix = "measure again with `piper profile`, or leave the line out"
        return CostModelError(where=self._where, field=name, value=self.text(name), rule=rule, fix=fix)


def _row(fields: _Fields) -> Measurement:
    return Measurement(
        device=fields.text("device"),
        op=fields.one_of("op", OPS),
        kernel=fields.text("kernel"),
        dtype=fields.one_of("dtype", DTYPE_BYTES),
        shape=fields.sizes("shape"),
        direction=fields.one_of("direction", DIRECTIONS),
        ranks=fields.whole("ranks"),
        time_s=fields.positive("time_us") / 1e6,
        repeats=fields.whole("repeats"),
        spread=fields.positive("spread", zero_ok=True),
        versions=fields.text("versions"),
    )

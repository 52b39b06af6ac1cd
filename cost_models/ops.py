"""The operation vocabulary: what a device computes, as shapes, dtype, FLOPs and bytes.

An `Operation` is one kernel (or `count` equal ones) of a forward, backward or update. FLOPs are those
that the kernel executes: 1 multiply-add = 2 FLOPs, and a causal flash attention executes half of the
score matrix. FLOPs *of the model* (for MFU) are counted elsewhere, by a named convention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from cost_models.errors import CostModelError

DTYPE_BYTES = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "int64": 8,
    "int32": 4,
    "bool": 1,
}


class OpKind(StrEnum):
    """What kind of kernel; the comment gives `Operation.shape`."""

    MATMUL = "matmul"  # [batch, m, n, k]: batch x ([m, k] @ [k, n])
    GROUPED_MATMUL = "grouped_matmul"  # [groups, m, n, k]: m rows over all groups
    ATTENTION = "attention"  # [batch, heads, kv_heads, seq_q, seq_kv, head_dim]
    NORM = "norm"  # [rows, hidden]
    SOFTMAX = "softmax"  # [rows, columns]
    CROSS_ENTROPY = "cross_entropy"  # [rows, vocabulary]
    EMBEDDING = "embedding"  # [rows, hidden]
    ELEMENTWISE = "elementwise"  # [elements]
    REDUCTION = "reduction"  # [elements read]
    COPY = "copy"  # [elements]
    OPTIMIZER = "optimizer"  # [parameters]
    FIXED = "fixed"  # []: the time is looked up by `name` (schedules without a model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """`count` equal kernels of one kind.

    Args:
        kind: which kernel; fixes the meaning of `shape`.
        name: where it came from, for people ("aten.mm.default").
        shape: dimensions, by kind.
        dtype: compute dtype, a key of `DTYPE_BYTES`.
        flops: FLOPs executed by one kernel.
        bytes: bytes that one kernel reads and writes at least once.
        count: how many equal kernels.
        causal: attention only: the upper half of the scores is skipped.
        direction: "fwd", "dgrad", "wgrad" or "bwd": which half of training the kernel belongs to.
    """

    kind: OpKind
    name: str
    shape: tuple[int, ...]
    dtype: str
    flops: int
    bytes: int
    count: int = 1
    causal: bool = False
    direction: str = "fwd"

    def __post_init__(self) -> None:
        if self.flops < 0 or self.bytes < 0 or self.count < 1:
            raise CostModelError(
                where="Operation",
                field="flops, bytes, count",
                value=f"{self.flops}, {self.bytes}, {self.count}",
                rule=f"must be >= 0, >= 0 and >= 1 ({self.name})",
                fix="count what the kernel does; a kernel that does nothing is left out",
            )

    @property
    def without_count(self) -> tuple[object, ...]:
        """Return what two operations have in common when one `count` can stand for both."""
        return (
            self.kind, self.name, self.shape, self.dtype, self.flops, self.bytes, self.causal, self.direction,
        )  # fmt: skip


def merge_equal(operations: Iterable[Operation], *, times: int = 1) -> tuple[Operation, ...]:
    """Join equal operations into one with the summed count (x `times`), in order of first appearance."""
    first: dict[tuple[object, ...], Operation] = {}
    counts: dict[tuple[object, ...], int] = {}
    for operation in operations:
        key = operation.without_count
        first.setdefault(key, operation)
        counts[key] = counts.get(key, 0) + operation.count * times
    return tuple(
        operation if operation.count == counts[key] else replace(operation, count=counts[key])
        for key, operation in first.items()
    )

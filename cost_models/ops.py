"""The operation vocabulary: what a device computes, as shapes, dtype, FLOPs and bytes.

An `Operation` is one kernel (or `count` equal ones) of a forward, backward or update. FLOPs are those
that the kernel executes: 1 multiply-add = 2 FLOPs, and a causal flash attention executes half of the
score matrix. FLOPs *of the model* (for MFU) are counted elsewhere, by a named convention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from cost_models.errors import CostModelError, require_positive_int

DTYPE_BYTES = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "int64": 8,
    "int32": 4,
    "uint64": 8,
    "uint8": 1,
    "bool": 1,
}

OPERAND_BITS = {"fp8": 8.0, "mxfp8": 8 + 8 / 32, "nvfp4": 4 + 8 / 16}
"""Bits of an element of an operand in a low precision, scales included: mxfp8 has an 8-bit scale per 32
elements (OCP microscaling specification 1.0), nvfp4 one per 16 (NVIDIA 2025, arXiv 2509.25149)."""


class OpKind(StrEnum):
    """What kind of kernel; the comment gives `Operation.shape`."""

    MATMUL = "matmul"  # [batch, m, n, k]: batch x ([m, k] @ [k, n])
    GROUPED_MATMUL = "grouped_matmul"  # [groups, m, n, k]: m rows over all groups; wgrad sums over m
    ATTENTION = "attention"  # [batch, heads, kv_heads, seq_q, seq_kv, head_dim]
    NORM = "norm"  # [rows, hidden]
    SOFTMAX = "softmax"  # [rows, columns]
    CROSS_ENTROPY = "cross_entropy"  # [rows, vocabulary]
    EMBEDDING = "embedding"  # [rows, hidden], wgrad: [rows, hidden, entries of the table]
    ELEMENTWISE = "elementwise"  # [elements]
    REDUCTION = "reduction"  # [elements read]
    COPY = "copy"  # [elements]
    QUANTISATION = "quantisation"  # [groups, rows, columns]: a bf16 operand into a low precision
    OPTIMIZER = "optimizer"  # [parameters]
    FIXED = "fixed"  # []: the time is looked up by `name` (schedules without a model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """`count` equal kernels of one kind.

    Args:
        kind: which kernel; fixes the meaning of `shape`.
        name: where it came from, for people ("aten.mm.default").
        shape: dimensions, by kind.
        dtype: compute dtype, a key of `DTYPE_BYTES` or `OPERAND_BITS`.
        flops: FLOPs executed by one kernel.
        bytes: bytes that one kernel reads and writes at least once.
        count: how many equal kernels.
        causal: attention only: the upper half of the scores is skipped.
        direction: "fwd", "dgrad", "wgrad" or "bwd": which half of training the kernel belongs to.
        tensor_dim: position in `shape` that tensor parallelism cuts, -1: none (not inside a region that can
            be cut, or computed in full by every rank).
        token_dim: position in `shape` that is proportional to the tokens of a sequence, -1: none.
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
    tensor_dim: int = -1
    token_dim: int = -1

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
            self.tensor_dim, self.token_dim,
        )  # fmt: skip


def kept_dtype(compute: str) -> str:
    """Return the dtype of parameters and activations under a compute dtype.

    Low precisions are for products only ([Note: low precision] in `low_precision.py`).
    """
    return "bf16" if compute in OPERAND_BITS else compute


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


def cut(operation: Operation, position: int, parts: int) -> Operation:
    """Return the share of one of `parts` devices that cut a dimension of a kernel (the largest share).

    FLOPs are proportional to the dimension; bytes follow from the new shape as far as the kind's shape tells
    them (a matmul reads its uncut operand whole), the rest is proportional; both are rounded up. Query heads
    take their key and value heads with them, down to one.

    Args:
        position: of the dimension in `shape`, such as `tensor_dim`; -1 cuts nothing.
        parts: how many devices share it, >= 1.
    Raises: CostModelError for a position outside of the shape, or parts below 1.
    """
    if position == -1:
        return operation
    if not 0 <= position < len(operation.shape):
        raise CostModelError(
            where=operation.name,
            field="position",
            value=position,
            rule=f"must be a position in the shape {list(operation.shape)}, or -1",
            fix="give Operation.tensor_dim or Operation.token_dim",
        )
    require_positive_int(
        parts, where=operation.name, field="parts", fix="give the degree, 1 or more", error=CostModelError
    )
    return resize(operation, position, _ceil(operation.shape[position], parts))


def resize(operation: Operation, position: int, size: int) -> Operation:
    """Return a kernel with one dimension of another size, smaller or larger; everything else as in `cut`.

    Fewer groups of a grouped matmul read fewer weights, but all rows are still there: its FLOPs stay.
    """
    whole = operation.shape[position]
    shape = list(operation.shape)
    shape[position] = size
    if operation.kind is OpKind.ATTENTION and position == _HEADS and whole:
        shape[_KV_HEADS] = _ceil(shape[_KV_HEADS] * size, whole)
    only_groups = operation.kind is OpKind.GROUPED_MATMUL and position == _GROUPS
    return replace(
        operation,
        shape=tuple(shape),
        flops=operation.flops if only_groups else _ceil(operation.flops * size, whole) if whole else 0,
        bytes=_resized_bytes(operation, tuple(shape), (size, whole)),
    )


_HEADS, _KV_HEADS = 1, 2
"""Positions in the shape of attention."""

_GROUPS = 0
"""Position in the shape of a grouped matmul."""

_FP32, _INT64 = DTYPE_BYTES["fp32"], DTYPE_BYTES["int64"]


def _resized_bytes(operation: Operation, shape: tuple[int, ...], share: tuple[int, int]) -> int:
    part, whole = share
    known = _bytes_of_shape(operation, operation.shape)
    if known is None or known > operation.bytes:
        return _ceil(operation.bytes * part, whole) if whole else 0
    rest = operation.bytes - known
    return (_bytes_of_shape(operation, shape) or 0) + (_ceil(rest * part, whole) if whole else 0)


def _bytes_of_shape(operation: Operation, shape: tuple[int, ...]) -> int | None:
    """Return the bytes that a kernel of this kind moves at least, None where the shape does not tell."""
    if operation.kind in {OpKind.MATMUL, OpKind.GROUPED_MATMUL}:
        left, right, result = product_elements(operation, shape)
        return product_bytes(operation.dtype, read=left + right, written=result)
    element = DTYPE_BYTES[operation.dtype]
    if operation.kind is OpKind.ATTENTION:
        # Forward: queries and results, keys and values, one fp32 sum per row; backward: their gradients too.
        batch, heads, kv_heads, seq_q, seq_kv, head_dim = shape
        times = 2 if operation.direction == "fwd" else 4
        rows = batch * heads * seq_q
        return times * element * head_dim * (rows + batch * kv_heads * seq_kv) + _FP32 * rows
    if operation.kind is OpKind.EMBEDDING and operation.direction == "wgrad":
        # Clear the table; read each row's number and gradient.
        rows, hidden, entries = shape
        return element * hidden * (rows + entries) + _INT64 * rows
    return None


def product_elements(operation: Operation, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the elements of the two operands and of the result of a (grouped) matmul of a shape."""
    outer, m, n, k = shape
    if operation.kind is OpKind.MATMUL:
        return outer * m * k, outer * k * n, outer * m * n
    if operation.direction == "wgrad":
        return m * k, m * n, outer * k * n
    return m * k, outer * k * n, m * n


def product_bytes(dtype: str, *, read: int, written: int) -> int:
    """Return the bytes of the elements that a product reads and writes; a low precision writes bf16."""
    if dtype in OPERAND_BITS:
        return round(read * OPERAND_BITS[dtype] / 8) + DTYPE_BYTES["bf16"] * written
    return DTYPE_BYTES[dtype] * (read + written)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)

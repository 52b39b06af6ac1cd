"""A measured row -> the `Operation` that it timed, with the FLOPs and bytes that capture would count."""

from __future__ import annotations

import math

from cost_models.calibration.table import Measurement
from cost_models.errors import CostModelError, nearest
from cost_models.ops import DTYPE_BYTES, Operation, OpKind

_MOVED = {
    "add": 3, "mul": 3, "silu": 2, "scale": 2, "sum_of_squares": 1, "mean": 1, "cat": 2, "clone": 2,
    "cross_entropy": 2,
}  # fmt: skip
"""Kernels that only move memory: how many tensors of the shape they read and write."""

_FLOPS_OF_BACKWARD = 2.5
"""FLOPs of a fused attention backward over its forward: 5 matrix products instead of 2 (Dao 2023)."""

_OPTIMIZER_TENSORS = 7
"""AdamW in fp32 reads parameter, gradient and two moments, and writes all but the gradient."""

_DIMS = {
    OpKind.MATMUL: 4, OpKind.GROUPED_MATMUL: 4, OpKind.ATTENTION: 6, OpKind.NORM: 2, OpKind.SOFTMAX: 2,
    OpKind.CROSS_ENTROPY: 2, OpKind.EMBEDDING: 2, OpKind.ELEMENTWISE: 1, OpKind.REDUCTION: 1, OpKind.COPY: 1,
    OpKind.OPTIMIZER: 1,
}  # fmt: skip
"""The kinds that are measured, with the sizes of their shape (see `OpKind`)."""

MEASURED = tuple(kind.value for kind in _DIMS)
_SHAPED = {
    OpKind.MATMUL,
    OpKind.GROUPED_MATMUL,
    OpKind.ATTENTION,
    OpKind.EMBEDDING,
    OpKind.OPTIMIZER,
    OpKind.NORM,
    OpKind.SOFTMAX,
}


def operation_of(row: Measurement) -> Operation:
    """Return the operation of a row whose `op` is an `OpKind`; CostModelError for a shape of another kind."""
    kind = OpKind(row.op)
    if len(row.shape) != _DIMS[kind]:
        raise CostModelError(
            where=row.case,
            field="shape",
            value="x".join(map(str, row.shape)),
            rule=f"must be {_DIMS[kind]} sizes for {kind.value}",
            fix="see OpKind in cost_models/ops.py for the meaning of each",
        )
    if kind not in _SHAPED and row.kernel not in _MOVED:
        raise CostModelError(
            where=row.case,
            field="kernel",
            value=row.kernel,
            rule="is not known",
            fix=nearest(row.kernel, _MOVED),
        )
    return Operation(
        kind=kind,
        name=row.kernel,
        shape=row.shape,
        dtype=row.dtype,
        flops=_flops(kind, row),
        bytes=_bytes(kind, row),
        causal=kind is OpKind.ATTENTION,
        direction=row.direction,
    )


def _flops(kind: OpKind, row: Measurement) -> int:
    if kind is OpKind.MATMUL:
        return 2 * math.prod(row.shape)
    if kind is OpKind.GROUPED_MATMUL:
        return 2 * math.prod(row.shape[1:])
    if kind is OpKind.ATTENTION:
        batch, heads, _, seq_q, seq_kv, head_dim = row.shape
        forward = 2 * batch * heads * seq_q * seq_kv * head_dim  # two products, the causal half of each
        return forward if row.direction == "fwd" else int(_FLOPS_OF_BACKWARD * forward)
    return 0


def _bytes(kind: OpKind, row: Measurement) -> int:  # noqa: PLR0911  one case per kind
    element, numel = DTYPE_BYTES[row.dtype], math.prod(row.shape)
    match kind:
        case OpKind.MATMUL:
            batch, m, n, k = row.shape
            return element * batch * (m * k + k * n + m * n)
        case OpKind.GROUPED_MATMUL:
            groups, m, n, k = row.shape
            return element * (m * k + groups * k * n + m * n)
        case OpKind.ATTENTION:
            batch, heads, kv_heads, seq_q, seq_kv, head_dim = row.shape
            times = 2 if row.direction == "fwd" else 4
            rows = batch * heads * seq_q
            moved = times * head_dim * (rows + batch * kv_heads * seq_kv)
            return element * moved + DTYPE_BYTES["fp32"] * rows
        case OpKind.EMBEDDING:
            return 2 * element * numel + DTYPE_BYTES["int64"] * row.shape[0]
        case OpKind.OPTIMIZER:
            return _OPTIMIZER_TENSORS * DTYPE_BYTES["fp32"] * numel
        case OpKind.NORM | OpKind.SOFTMAX:
            return (2 if row.direction == "fwd" else 3) * element * numel
        case _:
            return _MOVED[row.kernel] * element * numel

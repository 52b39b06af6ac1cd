"""Linear layers in fp8, mxfp8 or nvfp4: each product, and the quantisation of its two operands.

[Note: low precision]
A job whose compute dtype is one of these keeps parameters, activations, gradients and everything but the
products of linear layers (attention, norms, logits) in bf16. A linear layer quantises both operands of each
of its products when it needs them (forward: input and weights; gradients of inputs: gradient and weights; of
weights: gradient and input), as torchao's float8 training does, so that it keeps no copy from F to B. The
product itself writes bf16. Copies that live while a product runs are not counted as memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cost_models.ops import (
    DTYPE_BYTES,
    OPERAND_BITS,
    Operation,
    OpKind,
    product_bytes,
    product_elements,
)

ALIGNMENT = 16
"""Tensor cores take operands of 8 bits whose rows are multiples of 16 elements (cuBLAS: 16 bytes)."""

READS: Mapping[str, int] = {"fp8": 2, "mxfp8": 1, "nvfp4": 2}
"""How often quantising reads its tensor: the largest magnitude of a whole tensor must be known before the
first element is written; that of a block is found on the way.

fp8: one scale per tensor, from the tensor itself (Micikevicius et al. 2022, arXiv 2209.05433; torchao's
default). mxfp8: one per block. nvfp4: one per block, and one of the tensor (arXiv 2509.25149).
"""

_M, _N, _K = 1, 2, 3
"""Positions in the shape of a (grouped) matmul."""


def quantised(operation: Operation, dtype: str) -> tuple[Operation, ...]:
    """Return the kernels of a linear layer's product in `dtype`: two quantisations and the product.

    Operations that are no such product, or whose rows tensor cores do not take, return as they are.
    """
    if not takes_low_precision(operation):
        return (operation,)
    groups, m, n, k = operation.shape
    grouped = operation.kind is OpKind.GROUPED_MATMUL
    left = _quantisation(operation, dtype, shape=(1, m, k), positions=(_M, _K))
    if grouped and operation.direction == "wgrad":
        right = _quantisation(operation, dtype, shape=(1, m, n), positions=(_M, _N))
    else:
        right = _quantisation(operation, dtype, shape=(groups, n, k), positions=(_N, _K))
    a, b, result = product_elements(operation, operation.shape)
    product = replace(operation, dtype=dtype, bytes=product_bytes(dtype, read=a + b, written=result))
    return left, right, product


def takes_low_precision(operation: Operation) -> bool:
    """Return whether an operation is a product that tensor cores take in a low precision.

    Batched products (attention's) are none; nor is one with rows that do not fit. Rows of groups are padded.
    """
    if operation.kind is OpKind.GROUPED_MATMUL:
        return all(size % ALIGNMENT == 0 for size in operation.shape[_N:])
    if operation.kind is not OpKind.MATMUL or operation.shape[0] != 1:
        return False
    return all(size % ALIGNMENT == 0 for size in operation.shape[_M:])


def _quantisation(
    product: Operation, dtype: str, *, shape: tuple[int, int, int], positions: tuple[int, int]
) -> Operation:
    """Return the quantisation of an operand with rows and columns at `positions` of the product's shape."""
    elements = shape[0] * shape[1] * shape[2]

    def dim(position: int) -> int:
        return 1 + positions.index(position) if position in positions else -1

    return Operation(
        kind=OpKind.QUANTISATION,
        name=f"quantise.{dtype}",
        shape=shape,
        dtype="bf16",
        flops=elements,
        bytes=round(elements * (READS[dtype] * DTYPE_BYTES["bf16"] + OPERAND_BITS[dtype] / 8)),
        count=product.count,
        direction=product.direction,
        tensor_dim=dim(product.tensor_dim),
        token_dim=dim(product.token_dim),
    )

"""Operations -> prices: datasheet peaks times fitted efficiencies (formulas: the specs in `gpu.py`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import assert_never

from cost_models.band import band
from cost_models.errors import CostModelError
from cost_models.gpu import FITTED, Gpu
from cost_models.ops import DTYPE_BYTES, Operation, OpKind, kept_dtype
from cost_models.price import Price, Provenance
from cost_models.use import OperationUse

_BACKWARD_FLOPS_RATIO = 2.5
"""FLOPs of a fused attention backward over its forward: 5 matrix products instead of 2 (Dao 2023)."""

_QUERY_TILE = 128
"""Query rows of one thread block (FlashAttention 2 and 3)."""

_HEAD_64, _HEAD_128 = 64, 128

_TILE = 128
"""Rows and columns of one thread block of a large matmul (cuBLAS and CUTLASS: 128 x 128 to 256 x 128)."""

_ALIGNED_BYTES = 16
"""Where rows must begin for the fast tensor core kernels (NVIDIA's matrix multiplication guide)."""

_TOUCHED_PER_ROW = 3
"""How often an embedding gradient moves a row: read the gradient, read and write the entry of the table."""

_SLOWDOWN_OF = {
    OpKind.MATMUL: "matmul",
    OpKind.GROUPED_MATMUL: "matmul",
    OpKind.ATTENTION: "attention",
}
"""Which slowdown of a framework a kernel has; all others: "memory"."""

_NO_SLOWDOWNS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """The time of one kernel that has the device for itself: a term of the roofline, and latency.

    Args:
        processor_s, memory_s: bound by processors, or by memory bandwidth; one of them is 0.
        latency_s: of the smallest kernel.
        error, provenance: of the figures.
    """

    processor_s: float = 0.0
    memory_s: float = 0.0
    latency_s: float
    error: float
    provenance: Provenance

    def price(self) -> Price:
        """Return the price."""
        seconds = self.processor_s + self.memory_s + self.latency_s
        return band(seconds, error=self.error, provenance=self.provenance)

    def use(self, operation: Operation) -> OperationUse:
        """Return which term of the roofline bounds the kernel of `operation`."""
        return OperationUse(
            processor_s=self.processor_s,
            memory_s=self.memory_s,
            memory_bytes=float(operation.bytes) if self.memory_s > 0 else 0.0,
        )


class Roofline:
    """Prices operations on one device.

    Args:
        gpu: the device.
        attention_kernel: a class of `ATTENTION_KERNELS`, or `FITTED`.
        slowdowns: of a framework's kernels, by "matmul" (grouped ones, too), "attention" and "memory" (all
            others); 1 for what is not named.
    """

    def __init__(
        self, gpu: Gpu, *, attention_kernel: str = FITTED, slowdowns: Mapping[str, float] = _NO_SLOWDOWNS
    ) -> None:
        self.gpu = gpu
        self.attention_kernel = gpu.attention.kernel(attention_kernel)
        self._slowdowns = slowdowns

    def operation(self, operation: Operation) -> Price:
        """Price one kernel (not `count` of them).

        Raises: as `alone`.
        """
        return self.alone(operation).price()

    def operation_use(self, operation: Operation) -> OperationUse:
        """Return which term of the roofline bounds one kernel; raises as `alone`."""
        return self.alone(operation).use(operation)

    def alone(self, operation: Operation) -> Kernel:
        """Return the time of one kernel and what bounds it.

        Raises: CostModelError for `OpKind.FIXED`, for a dtype without a peak, for a shape of another kind.
        """
        alone = self._of_gpu(operation)
        slowdown = self._slowdowns.get(_SLOWDOWN_OF.get(operation.kind, "memory"), 1.0)
        if slowdown == 1:
            return alone
        return replace(
            alone,
            processor_s=alone.processor_s * slowdown,
            memory_s=alone.memory_s * slowdown,
            latency_s=alone.latency_s * slowdown,
        )

    def _of_gpu(self, operation: Operation) -> Kernel:
        match operation.kind:
            case OpKind.MATMUL:
                return self._matmul(operation)
            case OpKind.GROUPED_MATMUL:
                return self._grouped_matmul(operation)
            case OpKind.ATTENTION:
                return self._attention(operation)
            case (
                OpKind.NORM
                | OpKind.SOFTMAX
                | OpKind.CROSS_ENTROPY
                | OpKind.ELEMENTWISE
                | OpKind.REDUCTION
                | OpKind.COPY
                | OpKind.QUANTISATION
                | OpKind.OPTIMIZER
            ):
                return self._bandwidth_bound(operation)
            case OpKind.EMBEDDING:
                return self._embedding(operation)
            case OpKind.FIXED:
                raise CostModelError(
                    where=operation.name,
                    field="kind",
                    value="fixed",
                    rule="has no shape that hardware could price",
                    fix="price it with UnitCostModel, which looks the time up by name",
                )
            case _:
                assert_never(operation.kind)

    def _matmul(self, operation: Operation) -> Kernel:
        batch, *sizes = _shape(operation, 4)
        spec = self.gpu.matmul
        efficiency = spec.efficiency
        if batch > 1:
            efficiency = min(efficiency, spec.batched_efficiency * max(1.0, min(sizes) / _TILE))
        if _is_misaligned(operation):
            efficiency /= spec.misaligned_slowdown
        return self._roof(
            operation,
            self._product_s(operation, efficiency),
            slowdown=spec.wgrad_slowdown if operation.direction == "wgrad" else 1.0,
            latency_s=spec.latency_s,
            error=spec.error,
            provenance=_fitted(operation.dtype, (*spec.fitted_dtypes, *spec.dtype_efficiency)),
        )

    def _grouped_matmul(self, operation: Operation) -> Kernel:
        groups, rows, _, _ = _shape(operation, 4)
        spec = self.gpu.grouped_matmul
        efficiency = spec.efficiency_at(rows / groups, wgrad=operation.direction == "wgrad")
        return self._roof(
            operation,
            self._product_s(operation, efficiency),
            latency_s=self.gpu.matmul.latency_s,
            error=spec.error,
            provenance=spec.provenance,
        )

    def _attention(self, operation: Operation) -> Kernel:
        batch, heads, _, seq_q, seq_kv, head_dim = _shape(operation, 6)
        spec, kernel = self.gpu.attention, self.attention_kernel
        of_head = kernel.head64_factor + (1 - kernel.head64_factor) * (head_dim - _HEAD_64) / (
            _HEAD_128 - _HEAD_64
        )
        efficiency = kernel.efficiency * min(1.0, of_head) * seq_kv / (seq_kv + kernel.half_length)
        if operation.direction != "fwd":
            efficiency *= _BACKWARD_FLOPS_RATIO / kernel.backward_ratio
        waves = batch * heads * math.ceil(seq_q / _QUERY_TILE) / self.gpu.processors
        tail = 1 + spec.wave_penalty * (math.ceil(waves) / waves - 1)
        return self._roof(
            operation,
            self._compute_s(operation, efficiency) * tail,
            latency_s=spec.latency_s,
            error=spec.error,
            provenance=_fitted(operation.dtype, spec.fitted_dtypes),
        )

    def _bandwidth_bound(self, operation: Operation) -> Kernel:
        spec = self.gpu.bandwidth_bound
        rate = spec.fraction[operation.kind] * self.gpu.memory_bytes_per_s
        return self._moves(operation.bytes / rate)

    def _embedding(self, operation: Operation) -> Kernel:
        """Price a look-up, or its gradient: adding rows is as slow, clearing the table is not."""
        if operation.direction != "wgrad":
            return self._bandwidth_bound(operation)
        rows, hidden, _ = _shape(operation, 3)
        scattered = min(operation.bytes, _TOUCHED_PER_ROW * rows * hidden * DTYPE_BYTES[operation.dtype])
        spec, bandwidth = self.gpu.bandwidth_bound, self.gpu.memory_bytes_per_s
        seconds = scattered / (spec.fraction[OpKind.EMBEDDING] * bandwidth)
        seconds += (operation.bytes - scattered) / (spec.fraction[OpKind.COPY] * bandwidth)
        return self._moves(seconds)

    def _moves(self, memory_s: float) -> Kernel:
        """Return a kernel that only moves memory."""
        spec = self.gpu.bandwidth_bound
        return Kernel(
            memory_s=memory_s, latency_s=spec.latency_s, error=spec.error, provenance=spec.provenance
        )

    def _product_s(self, operation: Operation, efficiency: float) -> float:
        """Return the time at a share of the peak; a low precision is known by its ratio to bf16."""
        peak, ratio = self.gpu.peak(operation.dtype), self.gpu.matmul.dtype_efficiency
        if operation.dtype in ratio:
            peak = ratio[operation.dtype] * self.gpu.peak("bf16")
        return operation.flops / (efficiency * peak)

    def _compute_s(self, operation: Operation, efficiency: float) -> float:
        return operation.flops / (efficiency * self.gpu.peak(operation.dtype))

    def _roof(
        self,
        operation: Operation,
        compute_s: float,
        *,
        latency_s: float,
        error: float,
        provenance: Provenance,
        slowdown: float = 1.0,
    ) -> Kernel:
        """Return a kernel that takes `compute_s`, or as long as its bytes need if that is longer."""
        memory_s = operation.bytes / (self.gpu.matmul.bandwidth_fraction * self.gpu.memory_bytes_per_s)
        by_memory = memory_s > compute_s
        return Kernel(
            processor_s=0.0 if by_memory else compute_s * slowdown,
            memory_s=memory_s * slowdown if by_memory else 0.0,
            latency_s=latency_s,
            error=error,
            provenance=provenance,
        )


def _is_misaligned(operation: Operation) -> bool:
    """Return whether rows of an operand or the result begin off 16 bytes.

    Rows of x [m, k], weights [n, k] and y [m, n] have k and n elements; a weight gradient [m, n] reads the
    rows of y's gradient and of x, which have its m and n, and sums over k.
    """
    _, m, n, k = operation.shape
    element = DTYPE_BYTES[kept_dtype(operation.dtype)]
    rows = (m, n) if operation.direction == "wgrad" else (n, k)
    return any(size * element % _ALIGNED_BYTES for size in rows)


def _fitted(dtype: str, fitted_dtypes: tuple[str, ...]) -> Provenance:
    return Provenance.FITTED if dtype in fitted_dtypes else Provenance.DATASHEET


def _shape(operation: Operation, dims: int) -> tuple[int, ...]:
    if len(operation.shape) != dims or min(operation.shape, default=0) < 1:
        raise CostModelError(
            where=operation.name,
            field="shape",
            value=list(operation.shape),
            rule=f"must be {dims} sizes >= 1 for {operation.kind.value}",
            fix="see OpKind in cost_models/ops.py for the meaning of each",
        )
    return operation.shape

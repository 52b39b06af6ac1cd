"""Operations -> prices: datasheet peaks times fitted efficiencies (formulas: the specs in `gpu.py`)."""

from __future__ import annotations

import math
from typing import assert_never

from cost_models.band import band
from cost_models.errors import CostModelError
from cost_models.gpu import Gpu
from cost_models.ops import DTYPE_BYTES, Operation, OpKind
from cost_models.price import Price, Provenance

_BACKWARD_FLOPS_RATIO = 2.5
"""FLOPs of a fused attention backward over its forward: 5 matrix products instead of 2 (Dao 2023)."""

_QUERY_TILE = 128
"""Query rows of one thread block (FlashAttention 2 and 3)."""

_HEAD_64, _HEAD_128 = 64, 128

_TOUCHED_PER_ROW = 3
"""How often an embedding gradient moves a row: read the gradient, read and write the entry of the table."""


class Roofline:
    """Prices operations on one device.

    Args:
        gpu: the device.
        attention_kernel: "flash2", or "fitted": the kernel that the GPU's file was fitted to.
    """

    def __init__(self, gpu: Gpu, *, attention_kernel: str = "fitted") -> None:
        self.gpu = gpu
        self.attention_slowdown = gpu.attention.flash2_slowdown if attention_kernel == "flash2" else 1.0

    def operation(self, operation: Operation) -> Price:
        """Price one kernel (not `count` of them).

        Raises: CostModelError for `OpKind.FIXED`, for a dtype without a peak, for a shape of another kind.
        """
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

    def _matmul(self, operation: Operation) -> Price:
        _shape(operation, 4)
        spec = self.gpu.matmul
        seconds = self._at_least_memory(operation, self._compute_s(operation, spec.efficiency))
        slowdown = spec.wgrad_slowdown if operation.direction == "wgrad" else 1.0
        provenance = _fitted(operation.dtype, spec.fitted_dtypes)
        return band(seconds * slowdown + spec.latency_s, error=spec.error, provenance=provenance)

    def _grouped_matmul(self, operation: Operation) -> Price:
        groups, rows, _, _ = _shape(operation, 4)
        spec = self.gpu.grouped_matmul
        efficiency = spec.efficiency_at(rows / groups, wgrad=operation.direction == "wgrad")
        seconds = self._at_least_memory(operation, self._compute_s(operation, efficiency))
        return band(seconds + self.gpu.matmul.latency_s, error=spec.error, provenance=spec.provenance)

    def _attention(self, operation: Operation) -> Price:
        batch, heads, _, seq_q, seq_kv, head_dim = _shape(operation, 6)
        spec = self.gpu.attention
        of_head = spec.head64_factor + (1 - spec.head64_factor) * (head_dim - _HEAD_64) / (
            _HEAD_128 - _HEAD_64
        )
        efficiency = spec.efficiency * min(1.0, of_head) * seq_kv / (seq_kv + spec.half_length)
        if operation.direction != "fwd":
            efficiency *= _BACKWARD_FLOPS_RATIO / spec.backward_ratio
        efficiency /= self.attention_slowdown
        waves = batch * heads * math.ceil(seq_q / _QUERY_TILE) / self.gpu.processors
        tail = 1 + spec.wave_penalty * (math.ceil(waves) / waves - 1)
        seconds = self._at_least_memory(operation, self._compute_s(operation, efficiency) * tail)
        provenance = _fitted(operation.dtype, spec.fitted_dtypes)
        return band(seconds + spec.latency_s, error=spec.error, provenance=provenance)

    def _bandwidth_bound(self, operation: Operation) -> Price:
        spec = self.gpu.bandwidth_bound
        rate = spec.fraction[operation.kind] * self.gpu.memory_bytes_per_s
        return band(operation.bytes / rate + spec.latency_s, error=spec.error, provenance=spec.provenance)

    def _embedding(self, operation: Operation) -> Price:
        """Price a look-up, or its gradient: adding rows is as slow, clearing the table is not."""
        if operation.direction != "wgrad":
            return self._bandwidth_bound(operation)
        rows, hidden, _ = _shape(operation, 3)
        scattered = min(operation.bytes, _TOUCHED_PER_ROW * rows * hidden * DTYPE_BYTES[operation.dtype])
        spec, bandwidth = self.gpu.bandwidth_bound, self.gpu.memory_bytes_per_s
        seconds = scattered / (spec.fraction[OpKind.EMBEDDING] * bandwidth)
        seconds += (operation.bytes - scattered) / (spec.fraction[OpKind.COPY] * bandwidth)
        return band(seconds + spec.latency_s, error=spec.error, provenance=spec.provenance)

    def _compute_s(self, operation: Operation, efficiency: float) -> float:
        return operation.flops / (efficiency * self.gpu.peak(operation.dtype))

    def _at_least_memory(self, operation: Operation, compute_s: float) -> float:
        rate = self.gpu.matmul.bandwidth_fraction * self.gpu.memory_bytes_per_s
        return max(compute_s, operation.bytes / rate)


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

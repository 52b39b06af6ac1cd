"""`Gpu`: what one device can do, as datasheet peaks and fitted efficiencies per kind of kernel.

[Note: error of a figure]
`error` is the 90th percentile of |predicted / measured - 1| that the source of the figures reports. The
truth then lies between predicted / (1 + error) and predicted / (1 - error): that is the band of a `Price`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from cost_models.errors import CostModelError, nearest
from cost_models.ops import OpKind
from cost_models.price import Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulSpec:
    """Matrix multiplication: t = max(F / (efficiency P), bytes / (bandwidth_fraction BW)) + latency.

    [Note: what slows a matmul]
    Batched ones (attention's, an item per head) whose smallest dimension is 128 or less reach
    `batched_efficiency`; above, the efficiency grows with that dimension up to `efficiency`. Rows of an
    operand or of the result that are no multiple of 16 bytes (a vocabulary of 50257) divide it by
    `misaligned_slowdown`. In a low precision the rate is efficiency x dtype_efficiency x the peak of bf16.

    Args:
        efficiency: share of the dense peak that large multiplications reach in training.
        batched_efficiency: the same for batched ones with a dimension of 128 or less.
        misaligned_slowdown: time with rows that are no multiple of 16 bytes over that with padded ones.
        dtype_efficiency: rate of a low precision over that of bf16, without quantising, by dtype.
        bandwidth_fraction: share of the memory bandwidth when they are bound by it.
        latency_s: time of the smallest one on the device.
        wgrad_slowdown: time of a weight gradient (fp32 accumulation) over a forward of equal FLOPs.
        error: see [Note: error of a figure].
        fitted_dtypes: dtypes that the fit covers; others are datasheet peaks times this efficiency.
    """

    efficiency: float
    batched_efficiency: float
    misaligned_slowdown: float
    dtype_efficiency: Mapping[str, float]
    bandwidth_fraction: float
    latency_s: float
    wgrad_slowdown: float
    error: float
    fitted_dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMatmulSpec:
    """Grouped multiplication: efficiency by rows per group, between limits.

    [Note: efficiency of groups]
    Each efficiency belongs to the middle of its range on a logarithmic scale (half of the first limit, twice
    the last one) and is linear in the logarithm between these. It may not grow faster than the rows, so that
    more rows never take less time.

    Args:
        rows: rising limits, one fewer than efficiencies.
        efficiency: forward and input gradients.
        wgrad_efficiency: weight gradients.
        error: see [Note: error of a figure].
        provenance: of these figures.
    """

    rows: tuple[float, ...]
    efficiency: tuple[float, ...]
    wgrad_efficiency: tuple[float, ...]
    error: float
    provenance: Provenance

    @property
    def middles(self) -> tuple[float, ...]:
        """Return the rows per group to which each efficiency belongs; see [Note: efficiency of groups]."""
        between = (math.sqrt(low * high) for low, high in pairwise(self.rows))
        return (self.rows[0] / 2, *between, self.rows[-1] * 2)

    def efficiency_at(self, rows_per_group: float, *, wgrad: bool) -> float:
        """Return the share of the dense peak; see [Note: efficiency of groups]."""
        values = self.wgrad_efficiency if wgrad else self.efficiency
        middles = self.middles
        after = bisect_left(middles, rows_per_group)
        if after in {0, len(middles)}:
            return values[max(after - 1, 0)]
        low, high = middles[after - 1], middles[after]
        part = math.log(rows_per_group / low) / math.log(high / low)
        return values[after - 1] + part * (values[after] - values[after - 1])


ATTENTION_KERNELS = ("flash1", "flash2", "flash3", "cudnn")
"""Classes of fused attention kernels; `FITTED` stands for the best one of a device.

flash1: FlashAttention of 2022 (also its Triton version); flash2: of 2023, torch's default; flash3: of 2024,
written for Hopper; cudnn: cuDNN's fused attention (Transformer Engine's default on Hopper and Blackwell).
"""

FITTED = "fitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernel:
    """One class of fused attention kernels on one device; see `AttentionSpec`.

    Args:
        efficiency: share of the dense peak for long sequences and heads of 128, forward.
        half_length: sequence length at which half of that is reached.
        backward_ratio: time of the backward over the forward.
        head64_factor: efficiency with heads of 64 over heads of 128; linear in the head size.
    """

    efficiency: float
    half_length: float
    backward_ratio: float
    head64_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Fused attention: t = F / (E P) (1 + wave_penalty (ceil(q)/q - 1)) + latency.

    E = efficiency s / (s + half_length), both of the kernel's class; q, the waves of thread blocks, is
    batch x heads x ceil(s / 128) / processors.

    Args:
        kernels: by class, all of `ATTENTION_KERNELS`. A class that does not run on the device has the figures
            of the one that frameworks take instead.
        best: the fastest class for long sequences, which `FITTED` stands for.
        wave_penalty: how much of the last, partly filled wave is lost.
        latency_s: time of the smallest one.
        error: see [Note: error of a figure].
        fitted_dtypes: dtypes that the fit covers.
    """

    kernels: Mapping[str, AttentionKernel]
    best: str
    wave_penalty: float
    latency_s: float
    error: float
    fitted_dtypes: tuple[str, ...]

    def kernel(self, name: str) -> AttentionKernel:
        """Return the figures of a class of `ATTENTION_KERNELS`, or of `FITTED`."""
        return self.kernels[self.best if name == FITTED else name]


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthBoundSpec:
    """Kernels that only move memory: t = bytes / (fraction BW) + latency.

    Args:
        fraction: share of the memory bandwidth, by kind.
        latency_s: time of the smallest one.
        error: see [Note: error of a figure].
        provenance: of these figures.
    """

    fraction: Mapping[OpKind, float]
    latency_s: float
    error: float
    provenance: Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """The way between a device and its host, page-locked host memory: t = bytes / (efficiency BW) + latency.

    Args:
        bandwidth_bytes_per_s: of the link, one direction.
        efficiency: share that large copies reach.
        latency_s: time of the smallest copy.
        error: see [Note: error of a figure].
        provenance: of these figures.
    """

    bandwidth_bytes_per_s: float
    efficiency: float
    latency_s: float
    error: float
    provenance: Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device (a GPU, or a CPU core that stands in for one).

    Args:
        name: catalogue name, lower case.
        description: for people.
        asynchronous: kernels run after the host has launched them; false on a CPU, where calling is running.
        peak_flops_per_s: dense datasheet peak by dtype; "fp32" without tensor cores, "tf32" with.
        memory_bytes: as sold.
        usable_bytes: what a process can get of them, context included.
        memory_bytes_per_s: datasheet bandwidth.
        context_bytes: taken by driver and libraries before the first tensor.
        processors: streaming multiprocessors (cores).
        matmul, grouped_matmul, attention, bandwidth_bound: efficiencies by kind of kernel.
        host_link: to the host, or None (not stated: copies to the host cannot be priced).
        sources: where the figures of each section come from.
    """

    name: str
    description: str
    asynchronous: bool
    peak_flops_per_s: Mapping[str, float]
    memory_bytes: int
    usable_bytes: int
    memory_bytes_per_s: float
    context_bytes: int
    processors: int
    matmul: MatmulSpec
    grouped_matmul: GroupedMatmulSpec
    attention: AttentionSpec
    bandwidth_bound: BandwidthBoundSpec
    host_link: HostLink | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.context_bytes < self.usable_bytes <= self.memory_bytes:
            raise CostModelError(
                where=self.name,
                field="memory.usable",
                value=self.usable_bytes,
                rule="must be above memory.context and at most memory.capacity",
                fix="give what the driver reports as total memory (torch.cuda.mem_get_info)",
            )

    def peak(self, dtype: str) -> float:
        """Return the dense peak for `dtype` in FLOP/s; CostModelError if the device has none."""
        if dtype not in self.peak_flops_per_s:
            raise CostModelError(
                where=self.name,
                field="dtype",
                value=dtype,
                rule="has no peak FLOP/s on this device",
                fix=f"use another dtype, or add its peak; {nearest(dtype, self.peak_flops_per_s)}",
            )
        return self.peak_flops_per_s[dtype]

"""The file of a GPU -> `Gpu`."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from cost_models.errors import CostModelError, require_known
from cost_models.gpu import (
    ATTENTION_KERNELS,
    AttentionKernel,
    AttentionSpec,
    BandwidthBoundSpec,
    Gpu,
    GroupedMatmulSpec,
    HostLink,
    MatmulSpec,
)
from cost_models.ops import DTYPE_BYTES, OPERAND_BITS, OpKind
from cost_models.price import Provenance
from cost_models.units import Dimension
from cost_models.yaml_file import Section

BANDWIDTH_BOUND = (
    OpKind.NORM,
    OpKind.SOFTMAX,
    OpKind.CROSS_ENTROPY,
    OpKind.EMBEDDING,
    OpKind.ELEMENTWISE,
    OpKind.REDUCTION,
    OpKind.COPY,
    OpKind.QUANTISATION,
    OpKind.OPTIMIZER,
)
_SECTIONS = ("chip", "peak", "memory", "matmul", "grouped_matmul", "attention", "bandwidth_bound")


def read_gpu(content: Any, *, where: str) -> Gpu:
    """Return the GPU that `content` describes; CostModelError names `where` and the field."""
    keys = ("schema_version", "name", "description", *_SECTIONS, "host_link", "training")
    file = Section(content, where=where, keys=keys, sourced=False)
    chip = file.section("chip", ("processors", "asynchronous"))
    memory = file.section("memory", ("capacity", "usable", "bandwidth", "context"))
    peak = file.section("peak", tuple(DTYPE_BYTES | OPERAND_BITS))
    return Gpu(
        name=file.text("name"),
        description=file.text("description"),
        asynchronous=chip.flag("asynchronous"),
        peak_flops_per_s={dtype: peak.quantity(dtype, Dimension.FLOPS_PER_S) for dtype in peak.names()},
        memory_bytes=memory.size("capacity"),
        usable_bytes=memory.size("usable"),
        memory_bytes_per_s=memory.rate("bandwidth"),
        context_bytes=memory.size("context", zero_ok=True),
        processors=chip.integer("processors"),
        matmul=_matmul(file),
        grouped_matmul=_grouped_matmul(file),
        attention=_attention(file),
        bandwidth_bound=_bandwidth_bound(file),
        host_link=_host_link(file) if "host_link" in file else None,
        sources={name: content[name]["source"] for name in (*_SECTIONS, "host_link") if name in file},
    )


def _matmul(file: Section) -> MatmulSpec:
    keys = (
        "efficiency", "batched_efficiency", "misaligned_slowdown", "dtype_efficiency", "bandwidth_fraction",
        "latency", "wgrad_slowdown", "error", "fitted_dtypes",
    )  # fmt: skip
    section = file.section("matmul", keys)
    return MatmulSpec(
        efficiency=section.number("efficiency", up_to=1),
        batched_efficiency=section.number("batched_efficiency", up_to=1),
        misaligned_slowdown=section.number("misaligned_slowdown"),
        dtype_efficiency=_dtype_efficiency(section),
        bandwidth_fraction=section.number("bandwidth_fraction", up_to=1),
        latency_s=section.seconds("latency", zero_ok=True),
        wgrad_slowdown=section.number("wgrad_slowdown"),
        error=section.error(),
        fitted_dtypes=section.texts("fitted_dtypes"),
    )


def _dtype_efficiency(section: Section) -> dict[str, float]:
    """Read the ratios of low precisions; without one, a dtype has its datasheet peak x efficiency."""
    if "dtype_efficiency" not in section:
        return {}
    ratios = section.section("dtype_efficiency", tuple(OPERAND_BITS), sourced=False)
    return {dtype: ratios.number(dtype) for dtype in ratios.names()}


def _grouped_matmul(file: Section) -> GroupedMatmulSpec:
    section = file.section(
        "grouped_matmul", ("rows", "efficiency", "wgrad_efficiency", "error", "provenance")
    )
    spec = GroupedMatmulSpec(
        rows=section.numbers("rows"),
        efficiency=section.numbers("efficiency", up_to=1),
        wgrad_efficiency=section.numbers("wgrad_efficiency", up_to=1),
        error=section.error(),
        provenance=provenance(section),
    )
    for field, values in (("efficiency", spec.efficiency), ("wgrad_efficiency", spec.wgrad_efficiency)):
        if len(values) != len(spec.rows) + 1 or list(spec.rows) != sorted(spec.rows):
            raise CostModelError(
                where=section.where,
                field=f"grouped_matmul.{field}",
                value=list(values),
                rule="must have one value more than grouped_matmul.rows, which must rise",
                fix="write for example rows: [256, 1024] and three efficiencies",
            )
        points = pairwise(zip(spec.middles, values, strict=True))
        if any(high > low * (1 + math.log(more / rows)) for (rows, low), (more, high) in points):
            raise CostModelError(
                where=section.where,
                field=f"grouped_matmul.{field}",
                value=list(values),
                rule="must not grow faster than the rows per group: more rows would take less time",
                fix="give efficiencies that lie closer together, or limits that lie further apart",
            )
    return spec


def _attention(file: Section) -> AttentionSpec:
    keys = ("kernels", "best", "wave_penalty", "latency", "error", "fitted_dtypes")
    section = file.section("attention", keys)
    best, where = section.text("best"), section.where
    require_known(best, ATTENTION_KERNELS, where=where, field="attention.best", error=CostModelError)
    return AttentionSpec(
        kernels=_attention_kernels(section.section("kernels", ATTENTION_KERNELS, sourced=False)),
        best=best,
        wave_penalty=section.number("wave_penalty", zero_ok=True),
        latency_s=section.seconds("latency", zero_ok=True),
        error=section.error(),
        fitted_dtypes=section.texts("fitted_dtypes"),
    )


def _attention_kernels(section: Section) -> dict[str, AttentionKernel]:
    """Read every class: its figures, or the name of the class that has figures and runs instead."""
    own = [name for name in section.names() if not section.is_text(name)]
    read = {name: _attention_kernel(section, name) for name in own}
    for name in ATTENTION_KERNELS:
        if name not in own:
            other = section.text(name)
            field = f"{section.path}.{name}"
            require_known(other, own, where=section.where, field=field, error=CostModelError)
            read[name] = read[other]
    return read


def _attention_kernel(section: Section, name: str) -> AttentionKernel:
    keys = ("efficiency", "half_length", "backward_ratio", "head64_factor")
    kernel = section.section(name, keys, sourced=False)
    return AttentionKernel(
        efficiency=kernel.number("efficiency", up_to=1),
        half_length=kernel.number("half_length", zero_ok=True),
        backward_ratio=kernel.number("backward_ratio"),
        head64_factor=kernel.number("head64_factor", up_to=1),
    )


def _bandwidth_bound(file: Section) -> BandwidthBoundSpec:
    kinds = tuple(kind.value for kind in BANDWIDTH_BOUND)
    section = file.section("bandwidth_bound", (*kinds, "latency", "error", "provenance"))
    return BandwidthBoundSpec(
        fraction={kind: section.number(kind.value, up_to=1) for kind in BANDWIDTH_BOUND},
        latency_s=section.seconds("latency", zero_ok=True),
        error=section.error(),
        provenance=provenance(section),
    )


def _host_link(file: Section) -> HostLink:
    section = file.section("host_link", ("bandwidth", "efficiency", "latency", "error", "provenance"))
    return HostLink(
        bandwidth_bytes_per_s=section.rate("bandwidth"),
        efficiency=section.number("efficiency", up_to=1),
        latency_s=section.seconds("latency", zero_ok=True),
        error=section.error(),
        provenance=provenance(section),
    )


def provenance(section: Section) -> Provenance:
    """Return the field `provenance` of a section."""
    text = section.text("provenance")
    known = [item.value for item in Provenance]
    field = f"{section.path}.provenance"
    require_known(text, known, where=section.where, field=field, error=CostModelError)
    return Provenance(text)

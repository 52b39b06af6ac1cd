"""Rows of processes at once, launches, passes and messages -> cores and costs of a host (`HostSpec`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cost_models.calibration.fit import overlaid
from cost_models.calibration.network import transfer_times_s
from cost_models.calibration.table import CONTENTION, LAUNCH, MESSAGE, PASS, Measurement
from cost_models.errors import CostModelError
from cost_models.units import Dimension, parse_quantity

Content = dict[str, Any]
_STEP = 0.01
_MOST_KERNELS = 0.9
"""Kernels alone take no more of a pass: calling them takes something, too."""


def fit_host(content: Content, rows: Sequence[Measurement], *, stack: str, source: str) -> Content:
    """Return the cluster's content with a host section; its costs are those of `stack`.

    Args:
        content: of the cluster, its device already fitted.
        rows: contention, launches and passes; others are left alone.
        stack: whose runtime made the passes.
        source: of the figures.
    """
    content = _within_messages(content, rows)
    found = {**_cores(rows), **_costs(content, rows)}
    if any(name.endswith("overhead") for name in found):
        found |= {"stack": stack, "error": 0.3, "provenance": "fitted"}
    if not found:
        return content
    found["source"] = source
    return overlaid(content, {f"host.{name}": value for name, value in found.items()})


def _within_messages(content: Content, rows: Sequence[Measurement]) -> Content:
    """Lower the latency of the link where messages of the runtime, which cross it, took less in all."""
    mine = [row for row in rows if row.op == MESSAGE]
    key = "intra_collectives.transfer.latency"
    latency = content["intra_collectives"]["transfer"].get("latency", {}).get("ranks_2")
    if not mine or latency is None:
        return content
    alone = transfer_times_s(content, mine)
    excess_s = float(np.mean([time - row.time_s for row, time in zip(mine, alone, strict=True)]))
    if excess_s <= 0:
        return content
    least_s = max(_quantity(latency, Dimension.SECONDS) - excess_s, 0.0)
    return overlaid(content, {f"{key}.ranks_2": _us(least_s)})


def _cores(rows: Sequence[Measurement]) -> dict[str, Any]:
    """Return the cores that explain best how much longer n processes at once take than one."""
    mine = [row for row in rows if row.op == CONTENTION]
    if len({row.ranks for row in mine}) < 2:  # noqa: PLR2004  one process tells nothing
        return {}
    # One alone may be disturbed by other programs: nothing runs faster than undisturbed.
    alone_s = min(row.time_s for row in mine)
    ranks = np.array([row.ranks for row in mine])
    slower = np.array([row.time_s for row in mine]) / alone_s
    tried = np.arange(1.0, ranks.max() + _STEP, _STEP)
    errors = np.abs(np.log(np.maximum(1.0, ranks / tried[:, None]) / slower)).sum(axis=1)
    return {"cores": round(float(tried[int(np.argmin(errors))]), 2)}


def _costs(content: Content, rows: Sequence[Measurement]) -> dict[str, Any]:
    launches = [row.time_s for row in rows if row.op == LAUNCH]
    if launches:
        return {
            "launch_overhead": _us(min(launches)), "gradient_launch_overhead": "0us", "pass_overhead": "0us",
            "message_overhead": "0us",
        }  # fmt: skip
    passes = [row for row in rows if row.op == PASS]
    if len({row.direction for row in passes}) < 2 or len(passes) < 4:  # noqa: PLR2004  three figures are told
        return {}
    # t = pass + kernels x (launch + kernel), relative errors.
    kernels = np.array([row.shape[0] for row in passes], dtype=float)
    forward = np.array([row.direction == "fwd" for row in passes])
    columns = np.stack([np.ones(len(passes)), kernels * forward, kernels * ~forward], axis=1)
    times = np.array([row.time_s - _kernels_s(content["gpu"], row) for row in passes])
    from scipy.optimize import nnls  # 0.3 s, needed only here

    weights = np.array([row.time_s for row in passes])
    (once, ahead, back), _ = nnls(columns / weights[:, None], times / weights)
    return {
        "launch_overhead": _us(ahead),
        "gradient_launch_overhead": _us(back),
        "pass_overhead": _us(once),
        "message_overhead": _us(_message_s(content, rows)),
    }


def _kernels_s(gpu: Content, row: Measurement) -> float:
    """Return about what the kernels of a pass take by themselves: latencies, FLOPs of products, bytes."""
    if len(row.shape) != 3:  # noqa: PLR2004  three sizes
        raise CostModelError(
            where=row.case,
            field="shape",
            value="x".join(map(str, row.shape)),
            rule="must be three sizes: kernels, their FLOPs, their bytes",
            fix="measure again with `piper profile`, or leave the line out",
        )
    kernels, flops, moved = row.shape
    matmul, moving = gpu["matmul"], gpu["bandwidth_bound"]
    rate = matmul["efficiency"] * _quantity(gpu["peak"][row.dtype], Dimension.FLOPS_PER_S)
    bandwidth = moving["elementwise"] * _quantity(gpu["memory"]["bandwidth"], Dimension.BYTES_PER_S)
    seconds = kernels * _quantity(moving["latency"], Dimension.SECONDS) + flops / rate + moved / bandwidth
    return float(min(seconds, _MOST_KERNELS * row.time_s))


def _message_s(content: Content, rows: Sequence[Measurement]) -> float:
    """Return what messages of the runtime take beyond those that were measured alone."""
    mine = [row for row in rows if row.op == MESSAGE]
    if not mine:
        return 0.0
    beyond = [row.time_s - alone for row, alone in zip(mine, transfer_times_s(content, mine), strict=True)]
    return max(float(np.mean(beyond)), 0.0)


def _quantity(text: object, dimension: Dimension) -> float:
    return parse_quantity(text, dimension, where="calibration", field="figure", zero_ok=True)


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.4g}us"

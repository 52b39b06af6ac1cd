"""A cluster file whose work is so much slower: three factors, each within stated bounds.

[Note: factors of an anchor]
One measured job does not tell the figures of a machine apart. It may move three of them: all computation, all
communication, and what the host takes, each by one factor within `BOUNDS`. A job that needs more than that is
not explained by a slower machine; the file then stays at the bound, and what is left is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cost_models.calibration.fit import overlaid
from cost_models.read_measured import with_tables_inside
from cost_models.units import Dimension, parse_quantity

Content = dict[str, Any]
BOUNDS = {"compute": (0.5, 2.0), "communication": (0.25, 4.0), "host": (0.5, 2.0)}
"""Machines of one kind differ by less: two collections of one kernel by 25 % (p90), small collectives of one
GPU by a factor of 2 between sites, launches by a factor of 3 between hosts (`cost_models` sources)."""

_HOST_ERROR = 0.3
"""Between launches of two hosts of one kind (10 us, or 6 to 18: `stacks/piper.yaml`)."""

_MATMUL = ("efficiency", "batched_efficiency", "bandwidth_fraction")
_NETWORK = ("ring_efficiency", "all_to_all_efficiency", "transfer_efficiency")
_LATENCIES = ("ring_latency", "tree_latency", "peer_latency")
_HOST = ("launch_overhead", "gradient_launch_overhead", "pass_overhead", "message_overhead")


def bounded(name: str, factor: float) -> float:
    """Return a factor inside its bounds."""
    low, high = BOUNDS[name]
    return min(max(factor, low), high)


def slower(content: Content, factors: Mapping[str, float], *, stack: str, launch_s: float) -> Content:
    """Return a cluster file with work that takes so many times as long; keys of `factors`: those of `BOUNDS`.

    Args:
        content: of the file, with its device in `gpu`.
        factors: see [Note: factors of an anchor]; a share cannot pass 1.
        stack: whose host costs are scaled where the file has none.
        launch_s: launch overhead of that stack.
    """
    content = overlaid(content, _compute(content["gpu"], factors["compute"]))
    content = overlaid(content, _communication(content, factors["communication"]))
    content = with_tables_inside(content, slower=factors["communication"])
    return _with_host(content, factors["host"], stack=stack, launch_s=launch_s)


def _compute(gpu: Content, factor: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in _MATMUL:
        found[f"gpu.matmul.{name}"] = _share(gpu["matmul"][name], factor)
    for name in ("efficiency", "wgrad_efficiency"):
        shares = gpu["grouped_matmul"][name]
        found[f"gpu.grouped_matmul.{name}"] = [_share(share, factor) for share in shares]
    for name, kernel in gpu["attention"]["kernels"].items():
        if isinstance(kernel, dict):
            key = f"gpu.attention.kernels.{name}.efficiency"
            found[key] = _share(kernel["efficiency"], factor)
    for name, share in gpu["bandwidth_bound"].items():
        if name not in {"error", "latency", "provenance", "source"}:
            found[f"gpu.bandwidth_bound.{name}"] = _share(share, factor)
    for name in ("matmul", "attention", "bandwidth_bound"):
        found[f"gpu.{name}.latency"] = _time(gpu[name]["latency"], factor)
    return found


def _communication(content: Content, factor: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, curve in content["intra_collectives"].items():
        if not isinstance(curve, dict) or "bandwidth" not in curve:
            continue
        key = f"intra_collectives.{name}"
        found[f"{key}.bandwidth"] = _rate(curve["bandwidth"], factor)
        found |= {f"{key}.{part}": _time(curve[part], factor) for part in ("base", "per_rank", "sqrt")}
        for size, latency in curve.get("latency", {}).items():
            found[f"{key}.latency.{size}"] = _time(latency, factor)
    found["intra.bandwidth"] = _rate(content["intra"]["bandwidth"], min(factor, 1.0))
    if "inter_collectives" in content:
        network = content["inter_collectives"]
        for name in _NETWORK:
            found[f"inter_collectives.{name}"] = _share(network[name], factor)
        for name in _LATENCIES:
            found[f"inter_collectives.{name}"] = [_time(each, factor) for each in network[name]]
    return found


def _with_host(content: Content, factor: float, *, stack: str, launch_s: float) -> Content:
    host = content.get("host", {})
    if "stack" in host:
        known = {name: host[name] for name in _HOST}
        return overlaid(content, {f"host.{name}": _time(value, factor) for name, value in known.items()})
    if factor == 1.0:
        return content
    costs = dict.fromkeys(_HOST, "0us") | {"launch_overhead": f"{launch_s * factor * 1e6:.4g}us"}
    named = {"stack": stack, "provenance": "fitted", "source": f"{stack}, scaled by {factor:.3g}"}
    values: dict[str, Any] = {f"host.{name}": value for name, value in (costs | named).items()}
    return overlaid(content, values | {"host.error": _HOST_ERROR})


def _share(share: float, factor: float) -> float:
    return min(1.0, float(f"{float(share) / factor:.4g}"))


def _rate(rate: object, factor: float) -> str:
    found = parse_quantity(rate, Dimension.BYTES_PER_S, where="anchor", field="bandwidth")
    return f"{found / factor / 1e9:.6g}GB/s"


def _time(time: object, factor: float) -> str:
    found = parse_quantity(time, Dimension.SECONDS, where="anchor", field="latency", zero_ok=True)
    return f"{found * factor * 1e6:.4g}us"

"""Rows of collectives and transfers -> curves of a cluster; [Note: collective inside a node].

Latency is fitted for every group size that was measured, one bandwidth for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cost_models.calibration.fit import Parameter, fit, overlaid
from cost_models.calibration.table import COLLECTIVES, TRANSFER, Measurement
from cost_models.models.collectives import Collectives
from cost_models.price import CollectiveKind
from cost_models.read_cluster import read_cluster
from cost_models.read_gpu import read_gpu
from cost_models.units import Dimension, parse_quantity

Content = dict[str, Any]
Values = dict[str, str | float]
_SECTION = "intra_collectives"
_FASTEST_BYTES_PER_S = 5e12
"""More than any link: the curve may not be faster than the link, which is set to the fastest curve."""


def inside_node(content: Content, rows: Sequence[Measurement]) -> list[Measurement]:
    """Return the rows of communication among as many ranks as a node has."""
    return [row for row in rows if row.op in COLLECTIVES and row.ranks <= content["gpus_per_node"]]


def network_times_s(content: Content, rows: Sequence[Measurement]) -> list[float]:
    """Return the predicted time of rows of communication inside a node."""
    gpu = read_gpu(content["gpu"], where="calibration")
    collectives = Collectives(read_cluster(content, gpu=gpu, where="calibration"))
    return [_price(collectives, row) for row in rows]


def transfer_times_s(content: Content, rows: Sequence[Measurement]) -> list[float]:
    """Return the predicted time on the link of messages of the sizes of rows."""
    gpu = read_gpu(content["gpu"], where="calibration")
    collectives = Collectives(read_cluster(content, gpu=gpu, where="calibration"))
    return [
        collectives.transfer(size_bytes=row.shape[0], source_rank=0, target_rank=1).seconds for row in rows
    ]


def fit_network(content: Content, rows: Sequence[Measurement]) -> Content:
    """Return the cluster's content with the curves that `rows` tell."""
    chosen = inside_node(content, rows)
    if not chosen:
        return content
    link = content["intra"]["bandwidth"]
    content = _without_table(content)
    content = overlaid(content, {"intra.bandwidth": f"{_FASTEST_BYTES_PER_S / 1e9:g}GB/s"})
    for op in COLLECTIVES:
        mine = [row for row in chosen if row.op == op]
        if mine:
            content = overlaid(content, _fit_curve(content, op, mine))
    content = overlaid(content, {"intra.bandwidth": _link(content, link)})
    if any(row.op == TRANSFER for row in chosen):
        smallest = min((row for row in chosen if row.op == TRANSFER), key=lambda row: row.shape)
        content = overlaid(content, {"intra.latency": f"{smallest.time_s * 1e6:.4g}us"})
    return content


def _without_table(content: Content) -> Content:
    """Return the content without times that were measured on other machines: they would go before the fit."""
    section = {key: value for key, value in content[_SECTION].items() if key not in {"table", "table_error"}}
    return content | {_SECTION: section}


def _fit_curve(content: Content, op: str, rows: list[Measurement]) -> Values:
    sizes = sorted({row.ranks for row in rows})
    curve = f"{_SECTION}.{op}"
    parameters = [
        Parameter(
            key=f"{curve}.latency.ranks_{size}",
            prior=min(row.time_s for row in rows if row.ranks == size),
            low=1e-7, high=1.0, unit="us", scale=1e-6,
        )
        for size in sizes
    ]  # fmt: skip
    fastest = max(row.shape[0] / row.time_s for row in rows)
    parameters.append(
        Parameter(
            key=f"{curve}.bandwidth",
            prior=fastest,
            low=1e5,
            high=_FASTEST_BYTES_PER_S / 2,
            unit="GB/s",
            scale=1e9,
        )
    )
    cleared: Values = {f"{curve}.sqrt": "0us", f"{curve}.base": "0us", f"{curve}.per_rank": "0us"}
    base = overlaid(content, cleared)
    gpu = read_gpu(content["gpu"], where="calibration")

    def predict(values: Values) -> list[float]:
        cluster = read_cluster(overlaid(base, values), gpu=gpu, where="calibration")
        collectives = Collectives(cluster)
        return [_price(collectives, row) for row in rows]

    return cleared | fit(parameters, predict, [row.time_s for row in rows])


def _price(collectives: Collectives, row: Measurement) -> float:
    (size,) = row.shape
    if row.op == TRANSFER:
        return collectives.transfer(size_bytes=size, source_rank=0, target_rank=1).seconds
    return collectives.collective(CollectiveKind(row.op), size_bytes=size, ranks=range(row.ranks)).seconds


def _link(content: Content, given: str) -> str:
    """Return the bandwidth of the link: as given, but no less than the fastest curve."""
    curves = [content[_SECTION][op]["bandwidth"] for op in COLLECTIVES]
    rates = [
        parse_quantity(rate, Dimension.BYTES_PER_S, where="calibration", field="bandwidth")
        for rate in (given, *curves)
    ]
    return f"{max(rates) / 1e9:.6g}GB/s"

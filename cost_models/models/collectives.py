"""Collectives and transfers on two tiers -> prices (curves and constants: `topology.py`).

[Note: collective inside a node]
t = base + per_rank n + sqrt_s sqrt(w) + w / bandwidth, w = bytes x bus factor. All-reduce uses the curve of
the switch (NVLS) from the group size at which the library turns it on.

[Note: collective over nodes]
Every ring enters and leaves each node, so that the node with the fewest members is the bottleneck: bus
bandwidth = 8-norm of the curve inside the node and efficiency x interfaces of those members (the norm is the
minimum, rounded off where both are near). Latency grows per node for rings, per doubling for the trees of
all-reduce. In all-to-all the part for other nodes goes through each device's own share of the interfaces,
beside the part inside the node. A group is never faster than its members on one node would be alone.

[Note: ring shift]
Every member sends to the next and receives from the one before, all at once, as in a transfer (whose curve
was measured with both directions at once): the slowest link decides. Over nodes, the members that leave a
node divide what the members there own of its interfaces, and each drives one interface at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from cost_models.band import band
from cost_models.errors import CostModelError
from cost_models.price import CollectiveKind, Price, Provenance
from cost_models.topology import Cluster, Curve, InterNode, Spread

_NORM = 8
"""Exponent that rounds off the minimum of two near bandwidths (H100: 365 inside, 388 outside, 314 to 345
measured on 10 nodes; xxrjun/nccl-tests-cluster)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """The time of a transfer or collective that has the machine for itself.

    Args:
        seconds: from the last arrival to the last byte.
        latency_s: the part of them in which no bytes flow.
        error, provenance: of the figures.
    """

    seconds: float
    latency_s: float
    error: float
    provenance: Provenance

    def price(self) -> Price:
        """Return the price."""
        return band(self.seconds, error=self.error, provenance=self.provenance)


_FREE = Alone(seconds=0.0, latency_s=0.0, error=0.0, provenance=Provenance.DATASHEET)


class Collectives:
    """Prices collectives and transfers on one cluster.

    Args:
        cluster: links and curves.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def collective(self, kind: CollectiveKind, *, size_bytes: int, ranks: Sequence[int]) -> Price:
        """Price a collective, from the last arrival to the last byte; one rank costs 0 s.

        Args:
            kind: which one.
            size_bytes: nccl-tests convention, see `CollectiveKind`.
            ranks: members.
        Raises: CostModelError for ranks that the cluster lacks, repeated ranks, a negative size.
        """
        return self.price(kind, _checked(size_bytes), self.cluster.spread(ranks))

    def price(self, kind: CollectiveKind, size_bytes: int, spread: Spread) -> Price:
        """Price a collective of a group that lies like `spread`."""
        return self.alone(kind, size_bytes, spread).price()

    def alone(self, kind: CollectiveKind, size_bytes: int, spread: Spread) -> Alone:
        """Return the time of a collective of a group that lies like `spread`, and the latency in it."""
        if spread.num_ranks == 1:
            return _FREE
        if kind is CollectiveKind.RING_SHIFT:
            return self._exchange(size_bytes, spread, share=self._leaving_share(spread))
        curve = self._curve(kind, spread.most)
        if spread.num_nodes == 1:
            bus_bytes = size_bytes * bus_factor(kind, spread.num_ranks)
            return _on_curve(curve, _inside(curve, bus_bytes, spread.num_ranks), spread.num_ranks)
        network = self.cluster.network()
        inside = _inside(curve, size_bytes * bus_factor(kind, spread.most), spread.most)
        if kind is CollectiveKind.ALL_TO_ALL:
            seconds, latency_s = self._all_to_all_s(size_bytes, spread, curve)
        else:
            seconds, latency_s = self._ring_s(kind, size_bytes, spread=spread, curve=curve)
        if inside > seconds:
            seconds, latency_s = inside, _latency(curve, spread.most)
        return _over_nodes(network, size_bytes, seconds=seconds, latency_s=latency_s)

    def transfer(self, *, size_bytes: int, source_rank: int, target_rank: int) -> Price:
        """Price a point-to-point transfer, from both ends ready to the last byte.

        Raises: CostModelError for ranks that the cluster lacks, equal ranks, a negative size.
        """
        spread = self.cluster.spread((source_rank, target_rank))
        return self.alone_transfer(_checked(size_bytes), inside=spread.num_nodes == 1).price()

    def alone_transfer(self, size_bytes: int, *, inside: bool) -> Alone:
        """Return the time of a transfer inside a node or between two, and the latency in it."""
        spread = Spread(num_ranks=2, num_nodes=1 if inside else 2, fewest=1, most=1)
        return self._exchange(size_bytes, spread, share=math.inf if inside else self.cluster.network_share(1))

    def _exchange(self, size_bytes: int, spread: Spread, *, share: float) -> Alone:
        """Time messages between neighbours, sent at once, `share` bytes per second of network for each."""
        curve = self.cluster.transfer_curve
        inside = _inside(curve, size_bytes, 2)
        if spread.num_nodes == 1:
            return _on_curve(curve, inside, 2)
        network = self.cluster.network()
        outside = network.nic.latency_s + size_bytes / (network.transfer_efficiency * share)
        latency_s = network.nic.latency_s if outside >= inside else _latency(curve, 2)
        return _over_nodes(network, size_bytes, seconds=max(inside, outside), latency_s=latency_s)

    def _leaving_share(self, spread: Spread) -> float:
        """Return the network bandwidth of a member whose next one is on another node; [Note: ring shift]."""
        if spread.num_nodes == 1:
            return math.inf
        one = self.cluster.network().nic.bandwidth_bytes_per_s
        return min(one, self.cluster.network_share(spread.fewest) / spread.leaving)

    def _curve(self, kind: CollectiveKind, members: int) -> Curve:
        in_switch = self.cluster.in_switch
        if kind is CollectiveKind.ALL_REDUCE and in_switch and members >= self.cluster.in_switch_from:
            return in_switch
        return self.cluster.curves[kind]

    def _ring_s(
        self, kind: CollectiveKind, size_bytes: int, *, spread: Spread, curve: Curve
    ) -> tuple[float, float]:
        """Return the time and latency of an all-reduce, all-gather or reduce-scatter over several nodes."""
        network = self.cluster.network()
        bus_bytes = size_bytes * bus_factor(kind, spread.num_ranks)
        outside = network.ring_efficiency * self.cluster.network_share(spread.fewest)
        root_s = 0.0
        if curve is self.cluster.in_switch:
            if _two_node_tree(network, spread):
                outside *= bus_factor(kind, spread.num_ranks)
                root_s = curve.sqrt_s * math.sqrt(bus_bytes)
            else:
                curve = self.cluster.curves[kind]
        inside = curve.bandwidth_bytes_per_s if spread.most > 1 else math.inf
        if kind is CollectiveKind.ALL_REDUCE:
            hops, hop_s = math.ceil(math.log2(spread.num_nodes)), network.tree_latency_s
        else:
            hops, hop_s = spread.num_nodes, network.ring_latency_s
        latency = _latency(curve, spread.most) + hops * _ramp(hop_s, bus_bytes, network.protocol_switch_bytes)
        return latency + root_s + bus_bytes / _rounded_minimum(inside, outside), latency

    def _all_to_all_s(self, size_bytes: int, spread: Spread, curve: Curve) -> tuple[float, float]:
        """Return the time and latency of an all-to-all over several nodes, by the most remote peers."""
        network = self.cluster.network()
        remote = spread.num_ranks - spread.fewest
        remote_bytes = size_bytes * remote / spread.num_ranks
        local_bytes = size_bytes * (spread.most - 1) / spread.num_ranks
        outside_s = remote_bytes / (network.all_to_all_efficiency * self.cluster.network_share(1))
        inside_s = curve.sqrt_s * math.sqrt(local_bytes) + local_bytes / curve.bandwidth_bytes_per_s
        peer_s = _ramp(network.peer_latency_s, remote_bytes, network.protocol_switch_bytes)
        latency = _latency(curve, spread.most) + remote * peer_s
        return latency + max(outside_s, inside_s), latency


def bus_factor(kind: CollectiveKind, num_ranks: int) -> float:
    """Return bus bytes over `size_bytes`: what every link of a ring carries (nccl-tests PERFORMANCE.md)."""
    match kind:
        case CollectiveKind.ALL_REDUCE:
            return 2 * (num_ranks - 1) / num_ranks
        case CollectiveKind.ALL_GATHER | CollectiveKind.REDUCE_SCATTER | CollectiveKind.ALL_TO_ALL:
            return (num_ranks - 1) / num_ranks
        case CollectiveKind.RING_SHIFT:
            return 1.0
        case _:
            assert_never(kind)


def _on_curve(curve: Curve, seconds: float, num_ranks: int) -> Alone:
    return Alone(
        seconds=seconds,
        latency_s=_latency(curve, num_ranks),
        error=curve.error,
        provenance=curve.provenance,
    )


def _over_nodes(network: InterNode, size_bytes: int, *, seconds: float, latency_s: float) -> Alone:
    error = network.large_error if size_bytes >= network.large_bytes else network.small_error
    return Alone(seconds=seconds, latency_s=latency_s, error=error, provenance=network.provenance)


def _two_node_tree(network: InterNode, spread: Spread) -> bool:
    return network.two_node_tree and spread.num_nodes == 2  # noqa: PLR2004 (two nodes)


def _inside(curve: Curve, bus_bytes: float, num_ranks: int) -> float:
    root_s = curve.sqrt_s * math.sqrt(bus_bytes)
    return _latency(curve, num_ranks) + root_s + bus_bytes / curve.bandwidth_bytes_per_s


def _latency(curve: Curve, num_ranks: int) -> float:
    return curve.base_s + curve.per_rank_s * num_ranks if num_ranks > 1 else 0.0


def _ramp(latency_s: tuple[float, float], size_bytes: float, switch_bytes: int) -> float:
    small, large = latency_s
    return small + (large - small) * min(1.0, size_bytes / switch_bytes)


def _rounded_minimum(a: float, b: float) -> float:
    least, most = min(a, b), max(a, b)
    return float(least * (1 + (least / most) ** _NORM) ** (-1 / _NORM))


def _checked(size_bytes: int) -> int:
    if not size_bytes >= 0:
        raise CostModelError(
            where="collective",
            field="size_bytes",
            value=size_bytes,
            rule="must be a whole number >= 0",
            fix="give the bytes of the buffer (see CollectiveKind)",
        )
    return size_bytes

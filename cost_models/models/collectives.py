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
from typing import assert_never

from cost_models.band import band
from cost_models.errors import CostModelError
from cost_models.price import CollectiveKind, Price, Provenance
from cost_models.topology import Cluster, Curve, Spread

_NORM = 8
"""Exponent that rounds off the minimum of two near bandwidths (H100: 365 inside, 388 outside, 314 to 345
measured on 10 nodes; xxrjun/nccl-tests-cluster)."""

_FREE = Price(seconds=0.0, low_s=0.0, high_s=0.0, provenance=Provenance.DATASHEET)


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
        if spread.num_ranks == 1:
            return _FREE
        if kind is CollectiveKind.RING_SHIFT:
            return self._exchange(size_bytes, spread, share=self._leaving_share(spread))
        curve = self._curve(kind, spread.most)
        if spread.num_nodes == 1:
            seconds = _inside(curve, size_bytes * bus_factor(kind, spread.num_ranks), spread.num_ranks)
            return band(seconds, error=curve.error, provenance=curve.provenance)
        network = self.cluster.network()
        inside = _inside(curve, size_bytes * bus_factor(kind, spread.most), spread.most)
        if kind is CollectiveKind.ALL_TO_ALL:
            seconds = self._all_to_all_s(size_bytes, spread, curve)
        else:
            seconds = self._ring_s(kind, size_bytes, spread=spread, curve=curve)
        error = network.large_error if size_bytes >= network.large_bytes else network.small_error
        return band(max(seconds, inside), error=error, provenance=network.provenance)

    def transfer(self, *, size_bytes: int, source_rank: int, target_rank: int) -> Price:
        """Price a point-to-point transfer, from both ends ready to the last byte.

        Raises: CostModelError for ranks that the cluster lacks, equal ranks, a negative size.
        """
        spread = self.cluster.spread((source_rank, target_rank))
        share = self.cluster.network_share(1) if spread.num_nodes > 1 else math.inf
        return self._exchange(_checked(size_bytes), spread, share=share)

    def _exchange(self, size_bytes: int, spread: Spread, *, share: float) -> Price:
        """Price messages between neighbours, sent at once, `share` bytes per second of network for each."""
        curve = self.cluster.transfer_curve
        inside = _inside(curve, size_bytes, 2)
        if spread.num_nodes == 1:
            return band(inside, error=curve.error, provenance=curve.provenance)
        network = self.cluster.network()
        outside = network.nic.latency_s + size_bytes / (network.transfer_efficiency * share)
        error = network.large_error if size_bytes >= network.large_bytes else network.small_error
        return band(max(inside, outside), error=error, provenance=network.provenance)

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

    def _ring_s(self, kind: CollectiveKind, size_bytes: int, *, spread: Spread, curve: Curve) -> float:
        """Return the seconds of an all-reduce, all-gather or reduce-scatter over several nodes."""
        network = self.cluster.network()
        bus_bytes = size_bytes * bus_factor(kind, spread.num_ranks)
        outside = network.ring_efficiency * self.cluster.network_share(spread.fewest)
        root_s = 0.0
        if curve is self.cluster.in_switch:
            tree = network.two_node_tree and spread.num_nodes == 2  # noqa: PLR2004 (two nodes)
            if tree:
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
        return latency + root_s + bus_bytes / _rounded_minimum(inside, outside)

    def _all_to_all_s(self, size_bytes: int, spread: Spread, curve: Curve) -> float:
        """Return the seconds of an all-to-all over several nodes, of the rank with most remote peers."""
        network = self.cluster.network()
        remote = spread.num_ranks - spread.fewest
        remote_bytes = size_bytes * remote / spread.num_ranks
        local_bytes = size_bytes * (spread.most - 1) / spread.num_ranks
        outside_s = remote_bytes / (network.all_to_all_efficiency * self.cluster.network_share(1))
        inside_s = curve.sqrt_s * math.sqrt(local_bytes) + local_bytes / curve.bandwidth_bytes_per_s
        peer_s = _ramp(network.peer_latency_s, remote_bytes, network.protocol_switch_bytes)
        return _latency(curve, spread.most) + remote * peer_s + max(outside_s, inside_s)


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

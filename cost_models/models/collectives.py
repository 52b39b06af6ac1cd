"""Collectives and transfers on two tiers -> prices (curves and constants: `topology.py`).

[Note: collective inside a node]
What was measured goes first ([Note: between measurements] in `measured.py`), else t = base + per_rank n +
sqrt_s sqrt(w) + w / bandwidth, w = bytes x bus factor. All-reduce uses the curve of the switch (NVLS) from
the group size at which the library turns it on. In a rack of several nodes on one switch, this is so for all
of its devices ([Note: domains] in `topology.py`; below, a node is a domain).

[Note: collective over nodes]
Every ring enters and leaves each node, so that the node with the fewest members is the bottleneck: bus
bandwidth = 8-norm of the curve inside the node and efficiency x interfaces of those members (the norm is the
minimum, rounded off where both are near). Latency grows per node for rings, per doubling for the trees of
all-reduce. In all-to-all the part for other nodes goes through each device's own share of the interfaces,
beside the part inside the node. A group is never faster than its members on one node would be alone, unless
it was measured to be.

[Note: tree over two nodes]
A tree sends each byte once through the network in each direction, a ring nearly twice: over two nodes the bus
bandwidth of all-reduce may reach 2 (n - 1) / n of the interfaces (over more, trees pass each byte on as often
as rings). Inside a node a tree reaches less than a ring, unless the switch reduces; the faster one is taken.

[Note: ring shift]
Every member sends to the next and receives from the one before, all at once, as in a transfer (whose curve
was measured with both directions at once): the slowest link decides. Over nodes, the members that leave a
node divide what the members there own of its interfaces, and each drives one interface at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from cost_models.band import band
from cost_models.errors import CostModelError
from cost_models.measured import Distance, Measured, Timed
from cost_models.price import CollectiveKind, Price, Provenance, bus_factor
from cost_models.read_measured import TRANSFER
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


_PROVENANCE = {Distance.EXACT: Provenance.MEASURED, Distance.BETWEEN: Provenance.INTERPOLATED}

_TREE_INSIDE = 0.75
"""Bus bandwidth of a tree inside a node over that of a ring: two nodes of 8 A100 with 200 GB/s of interfaces
stay with the ring at 177 to 182 GB/s (argonne-lcf/alcf-nccl-tests results_sophia)."""

_FREE = Alone(seconds=0.0, latency_s=0.0, error=0.0, provenance=Provenance.DATASHEET)


class Collectives:
    """Prices collectives and transfers on one cluster.

    Args:
        cluster: links and curves.
        slowdown: of all of them under a framework.
        skew_s: by which members of a collective arrive apart, per doubling of their number.
    """

    def __init__(self, cluster: Cluster, *, slowdown: float = 1.0, skew_s: float = 0.0) -> None:
        self.cluster = cluster
        self._slowdown = slowdown
        self._skew_s = skew_s

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
        waited_s = self._skew_s * math.log2(spread.num_ranks)
        return self._slowed(self._of_cluster(kind, size_bytes, spread), waited_s=waited_s)

    def _slowed(self, alone: Alone, *, waited_s: float = 0.0) -> Alone:
        if self._slowdown == 1 and not waited_s:
            return alone
        seconds = alone.seconds * self._slowdown + waited_s
        return replace(alone, seconds=seconds, latency_s=alone.latency_s * self._slowdown + waited_s)

    def _of_cluster(self, kind: CollectiveKind, size_bytes: int, spread: Spread) -> Alone:
        if spread.num_ranks == 1:
            return _FREE
        if kind is CollectiveKind.RING_SHIFT:
            return self._exchange(size_bytes, spread, share=self._leaving_share(spread))
        curve = self._curve(kind, spread.most)
        if spread.num_nodes == 1:
            return _inside(curve, size_bytes * bus_factor(kind, spread.num_ranks), spread.num_ranks)
        formula = partial(self._over_nodes, kind, spread)
        return self._measured(kind.value, spread, size_bytes, formula=formula)

    def _over_nodes(self, kind: CollectiveKind, spread: Spread, size_bytes: float) -> Alone:
        """Return the time of a collective over several nodes by the formula."""
        curve = self._curve(kind, spread.most)
        inside = _inside(curve, size_bytes * bus_factor(kind, spread.most), spread.most)
        if kind is CollectiveKind.ALL_TO_ALL:
            seconds, latency_s = self._all_to_all_s(size_bytes, spread, curve)
        else:
            ring, tree = self._ring_s(kind, size_bytes, spread=spread), self._tree_s(kind, size_bytes, spread)
            seconds, latency_s = min(ring, tree)
        if inside.seconds > seconds:
            seconds, latency_s = inside.seconds, inside.latency_s
        return _of_network(self.cluster.network(), size_bytes, seconds=seconds, latency_s=latency_s)

    def _measured(
        self, op: str, spread: Spread, size_bytes: int, *, formula: Callable[[float], Alone]
    ) -> Alone:
        """Return the measured time over nodes; that of the formula where nothing near was measured."""
        network = self.cluster.network()
        measured = network.measured.get(op)
        by_formula = formula(size_bytes)
        if measured is None or spread.fewest != spread.most:
            return by_formula
        group = (spread.num_nodes, spread.most)
        found = measured.of_nodes(group, size_bytes, lambda size: formula(size).seconds)
        if found is None:
            return by_formula
        return _timed(found, measured=measured, formula=by_formula)

    def transfer(self, *, size_bytes: int, source_rank: int, target_rank: int) -> Price:
        """Price a point-to-point transfer, from both ends ready to the last byte.

        Raises: CostModelError for ranks that the cluster lacks, equal ranks, a negative size.
        """
        spread = self.cluster.spread((source_rank, target_rank))
        return self.alone_transfer(_checked(size_bytes), inside=spread.num_nodes == 1).price()

    def alone_transfer(self, size_bytes: int, *, inside: bool) -> Alone:
        """Return the time of a transfer inside a node or between two, and the latency in it."""
        spread = Spread(num_ranks=2, num_nodes=1 if inside else 2, fewest=1, most=1)
        share = math.inf if inside else self.cluster.network_share(1)
        return self._slowed(self._exchange(size_bytes, spread, share=share))

    def _exchange(self, size_bytes: int, spread: Spread, *, share: float) -> Alone:
        """Time messages between neighbours, sent at once, `share` bytes per second of network for each."""
        curve = self.cluster.transfer_curve
        if spread.num_nodes == 1:
            return _inside(curve, size_bytes, 2)
        network = self.cluster.network()

        def formula(size: float) -> Alone:
            inside = _inside(curve, size, 2)
            outside_s = network.nic.latency_s + size / (network.transfer_efficiency * share)
            latency_s = network.nic.latency_s if outside_s >= inside.seconds else inside.latency_s
            return _of_network(network, size, seconds=max(inside.seconds, outside_s), latency_s=latency_s)

        pair = Spread(num_ranks=2, num_nodes=2, fewest=1, most=1)
        if share < self.cluster.network_share(1):  # several messages share what was measured with one
            return formula(size_bytes)
        return self._measured(TRANSFER, pair, size_bytes, formula=formula)

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

    def _ring_s(self, kind: CollectiveKind, size_bytes: float, *, spread: Spread) -> tuple[float, float]:
        """Return the time and latency of an all-reduce, all-gather or reduce-scatter over several nodes."""
        network, curve = self.cluster.network(), self._curve(kind, spread.most)
        bus_bytes = size_bytes * bus_factor(kind, spread.num_ranks)
        outside = network.ring_efficiency * self.cluster.network_share(spread.fewest)
        root_s = 0.0
        if curve is self.cluster.in_switch:
            if self._over_two(spread):
                outside *= bus_factor(kind, spread.num_ranks)
                root_s = curve.sqrt_s * math.sqrt(bus_bytes)
            else:
                curve = self.cluster.curves[kind]
        inside = curve.bandwidth_bytes_per_s if spread.most > 1 else math.inf
        if kind is CollectiveKind.ALL_REDUCE:
            hops, hop_s = math.ceil(math.log2(spread.num_nodes)), network.tree_latency_s
        else:
            hops, hop_s = spread.num_nodes, network.ring_latency_s
        latency = curve.latency_s(spread.most) + hops * _ramp(hop_s, bus_bytes, network.protocol_switch_bytes)
        return latency + root_s + bus_bytes / _rounded_minimum(inside, outside), latency

    def _over_two(self, spread: Spread) -> bool:
        return self.cluster.network().two_node_tree and spread.num_nodes == 2  # noqa: PLR2004 (two nodes)

    def tree_is_faster(self, kind: CollectiveKind, size_bytes: float, spread: Spread) -> bool:
        """Tell whether a group over nodes goes as a tree without the switch; [Note: tree over two nodes]."""
        return self._tree_s(kind, size_bytes, spread) < self._ring_s(kind, size_bytes, spread=spread)

    def _tree_s(self, kind: CollectiveKind, size_bytes: float, spread: Spread) -> tuple[float, float]:
        """Return the time and latency of an all-reduce as a tree, endless where there is none."""
        if kind is not CollectiveKind.ALL_REDUCE or self.cluster.in_switch or not self._over_two(spread):
            return math.inf, math.inf
        network, curve = self.cluster.network(), self.cluster.curves[kind]
        factor = bus_factor(kind, spread.num_ranks)
        bus_bytes = size_bytes * factor
        outside = factor * network.ring_efficiency * self.cluster.network_share(spread.fewest)
        inside = _TREE_INSIDE * curve.bandwidth_bytes_per_s if spread.most > 1 else math.inf
        hop_s = _ramp(network.tree_latency_s, bus_bytes, network.protocol_switch_bytes)
        latency = curve.latency_s(spread.most) + hop_s
        return latency + bus_bytes / _rounded_minimum(inside, outside), latency

    def _all_to_all_s(self, size_bytes: float, spread: Spread, curve: Curve) -> tuple[float, float]:
        """Return the time and latency of an all-to-all over several nodes, by the most remote peers."""
        network = self.cluster.network()
        remote = spread.num_ranks - spread.fewest
        remote_bytes = size_bytes * remote / spread.num_ranks
        local_bytes = size_bytes * (spread.most - 1) / spread.num_ranks
        outside_s = remote_bytes / (network.all_to_all_efficiency * self.cluster.network_share(1))
        inside_s = curve.sqrt_s * math.sqrt(local_bytes) + local_bytes / curve.bandwidth_bytes_per_s
        peer_s = _ramp(network.peer_latency_s, remote_bytes, network.protocol_switch_bytes)
        latency = curve.latency_s(spread.most) + remote * peer_s
        return latency + max(outside_s, inside_s), latency


def _inside(curve: Curve, bus_bytes: float, num_ranks: int) -> Alone:
    """Return the time inside a node."""
    by_formula = Alone(
        seconds=curve.seconds(bus_bytes, num_ranks),
        latency_s=curve.latency_s(num_ranks),
        error=curve.error,
        provenance=curve.provenance,
    )
    if curve.measured is None or num_ranks == 1:
        return by_formula
    found = curve.measured.of_ranks(num_ranks, bus_bytes, curve.seconds)
    return _timed(found, measured=curve.measured, formula=by_formula)


def _timed(found: Timed, *, measured: Measured, formula: Alone) -> Alone:
    """Return a measured time, of which as large a part is latency as in that of the formula."""
    near = found.distance is not Distance.BEYOND
    latency = formula.latency_s / formula.seconds if formula.seconds else 0.0
    return Alone(
        seconds=found.seconds,
        latency_s=latency * found.seconds,
        error=measured.error if near else max(measured.error, formula.error),
        provenance=_PROVENANCE[found.distance] if near else formula.provenance,
    )


def _of_network(network: InterNode, size_bytes: float, *, seconds: float, latency_s: float) -> Alone:
    error = network.large_error if size_bytes >= network.large_bytes else network.small_error
    return Alone(seconds=seconds, latency_s=latency_s, error=error, provenance=network.provenance)


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

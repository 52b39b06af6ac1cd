"""`Cluster`: devices in nodes, two tiers of links, and where a group of ranks lies on them.

Ranks fill nodes in order: rank r is on node r // gpus_per_node.

[Note: domains]
A domain is what one switch of NVLink connects: mostly a node, in a rack of 72 GPUs many nodes. Groups lie
inside a domain or over several; network interfaces and the host belong to nodes. Ranks fill domains in order,
`gpus_per_domain` to each: schedulers place jobs in equal parts of racks, 64 of 72 GPUs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cost_models.errors import CostModelError, require_positive
from cost_models.gpu import Gpu
from cost_models.host import HostSpec
from cost_models.measured import Measured
from cost_models.price import CollectiveKind, Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """One direction of the link of one device (source: vendor sheet or `piper profile`)."""

    bandwidth_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        fix = "give bytes per second and seconds in one direction (NVLink 4: 450e9 and 5e-6)"
        for name, value in (
            ("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s),
            ("latency_s", self.latency_s),
        ):
            require_positive(value, where="LinkSpec", field=name, fix=fix, error=CostModelError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Time inside a node: t = base + per_rank n + sqrt_s sqrt(w) + w / bandwidth.

    w = bytes x bus factor (nccl-tests): 2 (n - 1) / n for all_reduce, (n - 1) / n for the others, 1 for a
    transfer. Links approach their bandwidth slowly; the root term fits that better than latency alone.

    Args:
        base_s, per_rank_s: latency, linear in the group size.
        latencies: or (members, seconds) at some group sizes, rising: linear between them, and as at the
            nearest one beyond; empty: as the two above say. Where members share cores it grows faster.
        sqrt_s: seconds per square root of a byte.
        bandwidth_bytes_per_s: reached by very large messages.
        error: see [Note: error of a figure] in `gpu.py`.
        provenance: of these figures.
        measured: times by bus bytes, which go before the formula, or None.
        bus_bytes_per_s: what the members reach together at most (`Cluster.bus_bytes_per_s`).
    """

    base_s: float
    per_rank_s: float
    sqrt_s: float
    bandwidth_bytes_per_s: float
    error: float
    provenance: Provenance
    measured: Measured | None = None
    bus_bytes_per_s: float = math.inf
    latencies: tuple[tuple[int, float], ...] = ()

    def latency_s(self, num_ranks: int) -> float:
        """Return the time of no bytes by the formula."""
        if num_ranks <= 1:
            return 0.0
        if not self.latencies:
            return self.base_s + self.per_rank_s * num_ranks
        sizes = [size for size, _ in self.latencies]
        after = bisect_left(sizes, num_ranks)
        if after in {0, len(sizes)} or sizes[after] == num_ranks:
            return self.latencies[min(after, len(sizes) - 1)][1]
        (low, low_s), (high, high_s) = self.latencies[after - 1 : after + 1]
        return low_s + (high_s - low_s) * (num_ranks - low) / (high - low)

    def seconds(self, bus_bytes: float, num_ranks: int) -> float:
        """Return the time by the formula."""
        root_s = self.sqrt_s * math.sqrt(bus_bytes)
        rate = min(self.bandwidth_bytes_per_s, self.bus_bytes_per_s / num_ranks)
        return self.latency_s(num_ranks) + root_s + bus_bytes / rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Spine:
    """Leaf switches below a spine that carries less than they do.

    Args:
        nodes_per_leaf: nodes on one leaf switch (or one group of rail switches).
        oversubscription: bandwidth of those nodes over that of the leaf's links to the spine.
    """

    nodes_per_leaf: int
    oversubscription: float


_MOST_OF_A_MESSAGE = 2**24
"""Bytes; see `Channels.of_message`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """Into how many channels the communication library divides large messages.

    A channel is one thread block, which has a processor of each member for itself (NVIDIA/nccl issue 689).
    The defaults are those of H100, see
    `clusters/dgx_h100.yaml`.

    Args:
        ring: of a ring inside a node.
        in_switch: of a reduction in the switch inside a node.
        two_node_tree: of the same over two nodes.
        messages: of all that one device sends and receives at once inside a node (all-to-all).
        per_rail: of a ring over nodes, for each rail (network interface) that its members on a node use.
        doubled_below: a ring over nodes with fewer channels than this has twice as many.
        per_peer: of messages to another node, for each peer.
    """

    ring: int = 24
    in_switch: int = 16
    two_node_tree: int = 16
    messages: int = 32
    per_rail: int = 2
    doubled_below: int = 16
    per_peer: int = 2

    def of_message(self, size_bytes: float, num_ranks: int) -> int:
        """Return the channels of one message between two of `num_ranks` that communicate inside a node.

        As many as there would be for each if all sent to all, and twice as many as long as a part is larger
        than 16 MiB (NVIDIA/nccl src/enqueue.cc, scheduleP2pTasksToPlan; 16 for a pair, 32 from 512 MB on:
        meta-pytorch/torchcomms pull 197).
        """
        channels = self.messages
        while channels * num_ranks > self.messages and channels > 1:
            channels //= 2
        while size_bytes / channels > _MOST_OF_A_MESSAGE and 2 * channels <= self.messages:
            channels *= 2
        return channels

    def of_rails(self, rails: int) -> int:
        """Return the channels of a ring over nodes whose members on a node use `rails`."""
        channels = self.per_rail * rails
        return 2 * channels if channels < self.doubled_below else channels


@dataclass(frozen=True, slots=True, kw_only=True)
class InterNode:
    """The network between nodes, and what collectives make of it.

    A latency is a pair: for tiny messages, and from `protocol_switch_bytes` (bus bytes) on; linear between.

    Args:
        nics_per_node: network interfaces of a node, shared equally by its devices.
        nic: one interface, one direction; its latency is that of a point-to-point transfer.
        ring_efficiency: share of the interfaces that rings reach.
        all_to_all_efficiency, transfer_efficiency: the same for all-to-all and point-to-point.
        ring_latency_s: per node of the ring (all-gather, reduce-scatter).
        tree_latency_s: per doubling of the nodes (all-reduce).
        peer_latency_s: per remote member (all-to-all).
        protocol_switch_bytes: where the second latency of each pair holds.
        two_node_tree: an all-reduce goes over two nodes as a tree where that is faster, which sends each
            byte once through the network instead of twice.
        large_bytes: messages from here on have `large_error`, smaller ones `small_error`.
        provenance: of these figures.
        spine: what leaf switches have to share, or None (every node has its full bandwidth to every other).
        measured: times by operation (`CollectiveKind`, or "transfer") of groups with as many members on each
            node, which go before the formulas.
    """

    nics_per_node: int
    nic: LinkSpec
    ring_efficiency: float
    all_to_all_efficiency: float
    transfer_efficiency: float
    ring_latency_s: tuple[float, float]
    tree_latency_s: tuple[float, float]
    peer_latency_s: tuple[float, float]
    protocol_switch_bytes: int
    two_node_tree: bool
    large_bytes: int
    large_error: float
    small_error: float
    provenance: Provenance
    spine: Spine | None = None
    measured: Mapping[str, Measured] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicators:
    """Device memory that the communication library takes on each rank, per communicator.

    Args:
        pair_bytes: of two ranks (pipeline transfers: one communicator per direction and peer).
        group_bytes: of more.
    """

    pair_bytes: int
    group_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Where a group lies: how many members on how many nodes ([Note: domains]: on how many domains).

    Args:
        num_ranks: members.
        num_nodes: nodes with at least one member.
        fewest, most: members on the node that has the fewest, the most.
        leaving: members of one node whose next member is on another node, on the node that has the most;
            counts where the group lies on several nodes.
    """

    num_ranks: int
    num_nodes: int
    fewest: int
    most: int
    leaving: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes of equal devices.

    Args:
        name: catalogue name, lower case.
        description: for people.
        gpu: every device.
        gpus_per_node: devices of a node, all on one switch.
        max_nodes: how many nodes there are, or None (any number).
        intra: link of one device inside its domain.
        curves: collectives inside a domain; a ring shift follows `transfer_curve`.
        in_switch: all-reduce with reduction in the switch (NVLS), or None.
        in_switch_from: smallest group that uses it.
        transfer_curve: point-to-point inside a domain.
        inter: the network, or None (one node).
        eager_limit_bytes: largest message that a send hands over without waiting for its receive.
        communicators: memory per communicator.
        channels: processors of communication.
        gpus_per_host_link: devices that share one link to the host.
        bus_bytes_per_s: what all devices of a node send to each other at most, in sum; None: each as much
            as its link carries, through a switch of their own.
        gpus_per_domain: devices of a job in one domain, a multiple of `gpus_per_node`; None: one node.
        host: of every node.
        sources: where the figures of each section come from.
    """

    name: str
    description: str
    gpu: Gpu
    gpus_per_node: int
    max_nodes: int | None
    intra: LinkSpec
    curves: Mapping[CollectiveKind, Curve]
    in_switch: Curve | None
    in_switch_from: int
    transfer_curve: Curve
    inter: InterNode | None
    eager_limit_bytes: int
    communicators: Communicators
    channels: Channels = field(default_factory=Channels)
    gpus_per_host_link: int = 1
    gpus_per_domain: int | None = None
    bus_bytes_per_s: float | None = None
    host: HostSpec = field(default_factory=HostSpec)
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.domain_gpus % self.gpus_per_node:
            raise _error(
                self.name,
                "domain.gpus",
                self.domain_gpus,
                rule=f"must be a multiple of the {self.gpus_per_node} GPUs of a node",
                fix="say how many GPUs of a job one switch connects",
            )
        if self.inter is not None and self.inter.spine is not None and self.domain_gpus != self.gpus_per_node:
            raise _error(
                self.name,
                "inter.spine",
                self.inter.spine,
                rule="cannot be told where a domain holds several nodes",
                fix="leave spine or domain out",
            )
        if self.inter is None and self.max_nodes != 1:
            raise _error(
                self.name,
                "max_nodes",
                self.max_nodes,
                rule="must be 1 without a network",
                fix="add the sections inter and inter_collectives, or say max_nodes: 1",
            )
        if self.host.cores is not None and self.max_nodes != 1:
            raise _error(
                self.name,
                "host.cores",
                self.host.cores,
                rule="needs max_nodes: 1: only the cores of one node are shared",
                fix="leave host.cores out, or say max_nodes: 1",
            )
        if self.gpus_per_node % self.gpus_per_host_link:
            raise _error(
                self.name,
                "host.gpus_per_link",
                self.gpus_per_host_link,
                rule=f"must divide the {self.gpus_per_node} GPUs of a node",
                fix="say how many neighbours share one link to the host",
            )
        for kind, curve in (*self.curves.items(), ("transfer", self.transfer_curve)):
            if not curve.bandwidth_bytes_per_s <= self.intra.bandwidth_bytes_per_s:
                raise _error(
                    self.name,
                    f"intra_collectives.{kind}.bandwidth",
                    curve.bandwidth_bytes_per_s,
                    rule=f"must not exceed the link, {self.intra.bandwidth_bytes_per_s:g} bytes per second",
                    fix="give bus bandwidth (bytes x bus factor / time) in one direction",
                )

    @property
    def max_gpus(self) -> int | None:
        """Return how many devices there are, or None (any number)."""
        return None if self.max_nodes is None else self.max_nodes * self.gpus_per_node

    @property
    def domain_gpus(self) -> int:
        """Return the devices of a job in one domain."""
        return self.gpus_per_domain or self.gpus_per_node

    def require_gpus(self, gpus: int, *, where: str = "cluster") -> None:
        """Raise CostModelError if a job of `gpus` devices is larger than the cluster."""
        if self.max_gpus is not None and gpus > self.max_gpus:
            raise _error(
                where,
                "gpus",
                gpus,
                rule=f"is more than the {self.max_gpus} GPUs of {self.name} "
                f"({self.max_nodes} x {self.gpus_per_node})",
                fix=f"use at most {self.max_gpus} GPUs, or a cluster without max_nodes",
            )

    def node(self, rank: int) -> int:
        """Return the node of `rank`; CostModelError if there is no such rank."""
        if rank < 0 or (self.max_gpus is not None and rank >= self.max_gpus):
            last = "" if self.max_gpus is None else f" and below {self.max_gpus}"
            fix = "use fewer ranks or a larger cluster"
            raise _error(self.name, "rank", rank, rule=f"must be >= 0{last}", fix=fix)
        return rank // self.gpus_per_node

    def domain(self, rank: int) -> int:
        """Return the domain of `rank`; CostModelError if there is no such rank."""
        return self.node(rank) * self.gpus_per_node // self.domain_gpus

    def spread(self, ranks: Sequence[int]) -> Spread:
        """Return where the group `ranks` lies; CostModelError if it is empty or names a rank twice."""
        if not ranks or len(set(ranks)) != len(ranks):
            fix = "name every member once"
            raise _error(self.name, "ranks", list(ranks), rule="must be distinct, at least one", fix=fix)
        nodes = [self.domain(rank) for rank in ranks]
        members = Counter(nodes).values()
        following = [*nodes[1:], nodes[0]]
        leaving = Counter(node for node, then in zip(nodes, following, strict=True) if node != then)
        return Spread(
            num_ranks=len(ranks),
            num_nodes=len(members),
            fewest=min(members),
            most=max(members),
            leaving=max(leaving.values(), default=1),
        )

    def distinct(self, members: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Return the first of those sets of ranks that lie alike: the same steps from node to node.

        Args:
            members: sets of one size.
        Raises: CostModelError for a rank that the cluster lacks.
        """
        import numpy as np  # pricing alone does without

        ranks = np.asarray(members, dtype=np.int64).reshape(len(members), -1)
        for rank in (int(ranks.min(initial=0)), int(ranks.max(initial=0))):
            self.node(rank)
        nodes = ranks // self.domain_gpus
        steps = nodes - nodes[:, :1]
        first = {row.tobytes(): number for number, row in reversed([*enumerate(steps)])}
        return [members[number] for number in sorted(first.values())]

    def network_share(self, members: int) -> float:
        """Return the network bandwidth in bytes per second, one direction, of `members` devices of a node.

        Every device owns an equal share of the node's interfaces: in a training job the groups of a node's
        other devices communicate at the same time. Raises CostModelError without a network.
        """
        network = self.network()
        total = network.nics_per_node * network.nic.bandwidth_bytes_per_s
        return total * members / self.gpus_per_node

    def network(self) -> InterNode:
        """Return the network between nodes; CostModelError if the cluster has one node."""
        if self.inter is None:
            fix = "use fewer ranks or a cluster with a network"
            raise _error(self.name, "inter", None, rule="is needed by a group over several nodes", fix=fix)
        return self.inter


def _error(where: str, field: str, value: object, *, rule: str, fix: str) -> CostModelError:
    return CostModelError(where=where, field=field, value=value, rule=rule, fix=fix)

"""The physical links of a job: how many of each kind, their capacity, and which ones a rank uses.

[Note: rails]
The devices of a node divide its network interfaces as evenly as they can be cut: 8 devices and 8 interfaces
are 8 rails of one interface, 8 devices and 2 interfaces are 2 rails that four devices share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from cost_models.errors import check_invariant
from cost_models.topology import Cluster
from cost_models.use import LinkKind, Machine

Ints = npt.NDArray[np.int64]


class Links:
    """Numbers and capacities of the links of a job.

    Args:
        cluster: what the ranks run on.
        num_ranks: of the job; they fill nodes in order, and links are counted for whole nodes.
    """

    def __init__(self, cluster: Cluster, num_ranks: int) -> None:
        self.cluster = cluster
        devices = cluster.gpus_per_node
        self.num_nodes = math.ceil(num_ranks / devices)
        network, host = cluster.inter, cluster.gpu.host_link
        self.rails_per_node = math.gcd(network.nics_per_node, devices) if network else 0
        self.nodes_per_leaf = network.spine.nodes_per_leaf if network and network.spine else 0
        node_rate = network.nics_per_node * network.nic.bandwidth_bytes_per_s if network else 0.0
        pairs: list[tuple[LinkKind, LinkKind, int, float]] = [
            (
                LinkKind.PORT_OUT, LinkKind.PORT_IN,
                self.num_nodes * devices, cluster.intra.bandwidth_bytes_per_s,
            ),
        ]  # fmt: skip
        if cluster.bus_bytes_per_s:
            pairs.append((LinkKind.BUS_OUT, LinkKind.BUS_IN, self.num_nodes, cluster.bus_bytes_per_s))
        if network:
            rails = self.num_nodes * self.rails_per_node
            pairs += [
                (LinkKind.RAIL_OUT, LinkKind.RAIL_IN, rails, node_rate / self.rails_per_node),
                (LinkKind.UPLINK_OUT, LinkKind.UPLINK_IN, self.num_nodes, node_rate),
            ]
            if network.spine:
                leaves = math.ceil(self.num_nodes / self.nodes_per_leaf)
                rate = self.nodes_per_leaf * node_rate / network.spine.oversubscription
                pairs.append((LinkKind.LEAF_OUT, LinkKind.LEAF_IN, leaves, rate))
        if host:
            count = self.num_nodes * (devices // cluster.gpus_per_host_link)
            pairs.append((LinkKind.HOST_OUT, LinkKind.HOST_IN, count, host.bandwidth_bytes_per_s))
        self.ranges: dict[LinkKind, range] = {}
        rates = []
        first = 0
        for leaving, entering, count, rate in pairs:
            for kind in (leaving, entering):
                self.ranges[kind] = range(first, first + count)
                rates.append(np.full(count, rate))
                first += count
        if cluster.host.cores is not None:
            self.ranges[LinkKind.CORES] = range(first, first + 1)
            rates.append(np.full(1, cluster.host.cores))
        self.bytes_per_s = np.concatenate(rates)

    def ports(self, kind: LinkKind, ranks: Ints) -> Ints:
        """Return the port of each rank."""
        return self.ranges[kind].start + ranks

    def buses(self, kind: LinkKind, ranks: Ints) -> Ints:
        """Return the bus of each rank, on a cluster that has buses."""
        return self.ranges[kind].start + ranks // self.cluster.gpus_per_node

    def hosts(self, kind: LinkKind, ranks: Ints) -> Ints:
        """Return the link to the host of each rank."""
        return self.ranges[kind].start + ranks // self.cluster.gpus_per_host_link

    def rails(self, ranks: Ints) -> Ints:
        """Return the rail of each rank, counted from 0 through all nodes; see [Note: rails]."""
        return ranks // (self.cluster.gpus_per_node // self.rails_per_node)

    def uplinks(self, kind: LinkKind, nodes: Ints) -> Ints:
        """Return the uplink of each node."""
        return self.ranges[kind].start + nodes

    def leaves(self, kind: LinkKind, nodes: Ints) -> Ints:
        """Return the link to the spine above each node."""
        return self.ranges[kind].start + nodes // self.nodes_per_leaf

    @property
    def cores(self) -> int | None:
        """Return the link that stands for the cores of the host, or None: they are not shared."""
        return self.ranges[LinkKind.CORES].start if LinkKind.CORES in self.ranges else None

    def machine(self) -> Machine:
        """Return the capacities, with the names of the links."""
        gpu = self.cluster.gpu
        return Machine(
            link_bytes_per_s=self.bytes_per_s,
            processors=gpu.processors,
            memory_bytes_per_s=gpu.memory_bytes_per_s,
            links=self.ranges,
            describe_link=_describer(self.ranges, self.rails_per_node),
            cores=self.cores,
        )


_NAMES = {
    LinkKind.PORT_OUT: "NVLink out of rank {0}",
    LinkKind.PORT_IN: "NVLink into rank {0}",
    LinkKind.BUS_OUT: "bus of node {0}, out",
    LinkKind.BUS_IN: "bus of node {0}, in",
    LinkKind.RAIL_OUT: "network interface {2} of node {1}, out",
    LinkKind.RAIL_IN: "network interface {2} of node {1}, in",
    LinkKind.UPLINK_OUT: "uplink of node {0}, out",
    LinkKind.UPLINK_IN: "uplink of node {0}, in",
    LinkKind.LEAF_OUT: "leaf switch {0} to the spine",
    LinkKind.LEAF_IN: "spine to leaf switch {0}",
    LinkKind.HOST_OUT: "host link {0}, to the host",
    LinkKind.HOST_IN: "host link {0}, to the device",
    LinkKind.CORES: "cores of the host",
}


def _describer(ranges: Mapping[LinkKind, range], rails_per_node: int) -> Callable[[int], str]:
    def describe(link: int) -> str:
        for kind, numbers in ranges.items():
            if link in numbers:
                number = link - numbers.start
                node, rail = divmod(number, rails_per_node or 1)
                return _NAMES[kind].format(number, node, rail)
        check_invariant(False, f"there is no link {link}")
        return ""

    return describe

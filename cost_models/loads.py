"""What transfers, collectives and host copies hold of a cluster (times: `models/collectives.py`).

[Note: bytes over links]
Rings: a member sends the bus bytes to its neighbour. Of a set over several nodes, the rings leave each node
by another of its k members: 1/k of a member's bytes go over its rail, the rest over NVLink, and every node
sends the bus bytes to the next one. Reduction in the switch: a member sends its buffer for reduction and its
part of the result for distribution, and receives as much: size (1 + 1/k); over two nodes as a tree, each node
sends size bytes to the other over the rails of its members. All-to-all: a member sends size / n to every
other one. Ring shifts and transfers: the message, over the links on its way.

[Note: bytes in memory]
What is sent is read once, what is received is written once: 2 bytes per bus byte, 1 for either end of a
transfer. Where a ring reduces, it reads what it received and its own part and writes the sum to the next
member: 3; all-reduce is one half of each. Reduction in the switch reads and writes the buffer once: 2 per
byte of the buffer. Copies to and from buffers of the network are left out: it is slow beside the memory.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from cost_models.errors import CostModelError
from cost_models.layout import Flags, Ints, Layout
from cost_models.links import Links
from cost_models.models.collectives import Collectives
from cost_models.price import CollectiveKind, bus_factor
from cost_models.use import CommunicationUse, LinkKind

Floats = npt.NDArray[np.float64]

_MEMORY_PER_BUS_BYTE = {
    CollectiveKind.ALL_REDUCE: 2.5,
    CollectiveKind.REDUCE_SCATTER: 3.0,
    CollectiveKind.ALL_GATHER: 2.0,
    CollectiveKind.ALL_TO_ALL: 2.0,
    CollectiveKind.RING_SHIFT: 2.0,
}
"""See [Note: bytes in memory]."""

_BYTES_PER_CHANNEL = 32 * 1024
"""Smaller collectives use fewer channels: 64 bytes for each of 512 threads (NVIDIA/nccl src/enqueue.cc)."""
_BYTES_OF_A_MESSAGE = 64 * 1024
"""Smaller messages use fewer channels: an eighth of a step of 512 KiB (NVIDIA/nccl src/enqueue.cc)."""


_MOST_LAYOUTS = 64
"""Kept at once: a job has a handful."""


class Loads:
    """What the communication of a job holds.

    Args:
        collectives: their prices on what the ranks run on.
        num_ranks: of the job.
    """

    def __init__(self, collectives: Collectives, *, num_ranks: int) -> None:
        self.cluster = collectives.cluster
        self.links = Links(self.cluster, num_ranks)
        self._collectives = collectives
        self._layouts: dict[tuple[tuple[int, ...], bytes], Layout] = {}

    def transfer(
        self, *, size_bytes: int, pairs: Ints, communicators: Ints | None = None
    ) -> CommunicationUse:
        """Return what transfers of `size_bytes` hold that run at once.

        Args:
            size_bytes: of each.
            pairs: int64 [n, 2], from and to.
            communicators: int64 [n, members], all ranks among whom such messages go; None: the pairs alone.
        """
        pairs = self._checked(pairs)
        among = self._layout_of(pairs if communicators is None else communicators)
        source, target = pairs[:, 0], pairs[:, 1]
        entries = _Entries(self.links)
        near = self._add_messages(entries, source, target, size_bytes=size_bytes)
        alone = [
            self._collectives.alone_transfer(size_bytes, inside=inside) for inside in np.unique(near).tolist()
        ]
        channels = self._message_channels(among, size_bytes)
        slowest = max(alone, key=lambda time: time.seconds)
        on_cores = self.links.cores is not None
        self._add_cores(entries, pairs.size, slowest.seconds)
        return entries.use(
            latency_s=0.0 if on_cores else slowest.latency_s,
            processors=_used(channels, size_bytes, _BYTES_OF_A_MESSAGE),
            memory_bytes=size_bytes,
        )

    def collective(self, kind: CollectiveKind, *, size_bytes: int, members: Ints) -> CommunicationUse:
        """Return what a collective of several sets of ranks holds; members: int64 [sets, n]."""
        layout = self._layout_of(members)
        entries = _Entries(self.links)
        if layout.num_ranks == 1:
            return entries.use(latency_s=0.0, processors=0, memory_bytes=0)
        spreads = layout.spreads(shift=kind is CollectiveKind.RING_SHIFT)
        slowest = max(
            (self._collectives.alone(kind, size_bytes, spread) for spread in spreads),
            key=lambda time: time.seconds,
        )
        bus_bytes = size_bytes * bus_factor(kind, layout.num_ranks)
        memory_bytes, messages = _MEMORY_PER_BUS_BYTE[kind] * bus_bytes, 1
        if kind is CollectiveKind.RING_SHIFT:
            target = np.roll(layout.members, -1, axis=1).ravel()
            self._add_messages(entries, layout.flat, target, size_bytes=size_bytes)
            channels = self._message_channels(layout, size_bytes)
        elif kind is CollectiveKind.ALL_TO_ALL:
            self._add_all_to_all(entries, layout, size_bytes=size_bytes)
            channels = self._all_to_all_channels(layout)
            messages = layout.num_ranks - 1
        else:
            switched = self._switched(kind, layout)
            outside = self._outside(kind, layout, switched, sizes=(bus_bytes, size_bytes))
            self._add_ring(entries, layout, switched, sizes=(bus_bytes, size_bytes), outside=outside)
            channels = self._ring_channels(layout, switched)
            if switched.any():
                memory_bytes = 2.0 * size_bytes
        self._add_cores(entries, layout.flat.size, slowest.seconds - slowest.latency_s)
        return entries.use(
            latency_s=slowest.latency_s,
            processors=min(channels, max(messages, _used(channels, size_bytes, _BYTES_PER_CHANNEL))),
            memory_bytes=memory_bytes,
        )

    def _layout_of(self, members: Ints) -> Layout:
        """Return how sets of ranks lie; jobs ask for a few of them again and again."""
        key = members.shape, members.tobytes()
        if key not in self._layouts:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = Layout(self._checked(members), self.cluster.domain_gpus)
        return self._layouts[key]

    def host_copy(self, *, size_bytes: int, ranks: Ints, to_host: bool) -> CommunicationUse:
        """Return what copies between devices and their host hold: a copy engine needs no processors."""
        ranks = self._checked(ranks)
        entries = _Entries(self.links)
        link = self.cluster.gpu.host_link
        if link is not None:
            kind = LinkKind.HOST_OUT if to_host else LinkKind.HOST_IN
            entries.add(self.links.hosts(kind, ranks), size_bytes)
        latency_s = link.latency_s if link else 0.0
        return entries.use(latency_s=latency_s, processors=0, memory_bytes=size_bytes)

    def _add_cores(self, entries: _Entries, members: int, seconds: float) -> None:
        """Add a core for each member during `seconds`, at most all; [Note: cores that processes share]."""
        cores = self.cluster.host.cores
        if self.links.cores is not None and cores is not None:
            entries.add(np.array([self.links.cores]), min(members, cores) * seconds)

    def _message_channels(self, layout: Layout, size_bytes: int) -> int:
        """Return the channels of one message among sets of ranks, of which some may lie on several nodes."""
        channels = self.cluster.channels
        if (layout.num_nodes > 1).any():
            return channels.per_peer
        return channels.of_message(size_bytes, layout.num_ranks)

    def _all_to_all_channels(self, layout: Layout) -> int:
        remote = layout.num_nodes > 1
        if not remote.any():
            return self.cluster.channels.messages
        return _power_of_two(self.cluster.channels.of_rails(self._rails_of(layout, remote)))

    def _ring_channels(self, layout: Layout, switched: Flags) -> int:
        """Return the channels of a ring or a reduction in the switch."""
        channels, remote = self.cluster.channels, layout.num_nodes > 1
        if not remote.any():
            return channels.in_switch if switched.any() else channels.ring
        return channels.two_node_tree if switched.any() else channels.of_rails(self._rails_of(layout, remote))

    def _rails_of(self, layout: Layout, remote: Flags) -> int:
        """Return the most rails that a set over several nodes uses on one."""
        chosen = layout.members[remote]
        rails, per_node = self.links.rails(chosen), self.links.rails_per_node
        used = np.unique(rails + np.arange(len(chosen))[:, None] * self.links.num_nodes * per_node)
        return int(np.unique(used // per_node, return_counts=True)[1].max())

    def _switched(self, kind: CollectiveKind, layout: Layout) -> Flags:
        """Tell for each set whether the switch reduces (`Collectives.price`)."""
        network = self.cluster.inter
        tree = (layout.num_nodes == 2) & bool(network and network.two_node_tree)  # noqa: PLR2004 (two nodes)
        where = (layout.num_nodes == 1) | tree
        able = kind is CollectiveKind.ALL_REDUCE and self.cluster.in_switch is not None
        switched: Flags = where & able & (layout.most >= self.cluster.in_switch_from)
        return switched

    def _outside(
        self, kind: CollectiveKind, layout: Layout, switched: Flags, *, sizes: tuple[float, float]
    ) -> Floats:
        """Return the bytes that each set sends out of a node: [sets]; sizes: bus bytes, bytes."""
        bus_bytes, size_bytes = sizes
        once = switched
        for spread in layout.spreads(shift=False):
            if spread.num_nodes > 1 and self._collectives.tree_is_faster(kind, size_bytes, spread):
                once = once | (layout.num_nodes == spread.num_nodes)
        return np.where(once, size_bytes, bus_bytes)

    def _add_messages(self, entries: _Entries, source: Ints, target: Ints, *, size_bytes: float) -> Flags:
        """Add one message from each source to its target; return which stay inside a node."""
        from_node, to_node = source // self.cluster.gpus_per_node, target // self.cluster.gpus_per_node
        near: Flags = source // self.cluster.domain_gpus == target // self.cluster.domain_gpus
        entries.add_ports(source[near], size_bytes, into=target[near])
        if not near.all():
            entries.add_rails(source[~near], size_bytes, into=target[~near])
            entries.add_uplinks(from_node[~near], size_bytes, into=to_node[~near])
        return near

    def _add_ring(
        self,
        entries: _Entries,
        layout: Layout,
        switched: Flags,
        *,
        sizes: tuple[float, float],
        outside: Floats,
    ) -> None:
        """Add rings, trees and reductions in the switch; sizes: bus bytes, bytes; [Note: bytes over links].

        Args:
            outside: bytes that each set sends out of a node, [sets].
        """
        remote = layout.num_nodes > 1
        far, reduced, here = layout.per_member(remote), layout.per_member(switched), layout.here
        bus_bytes, size_bytes = sizes
        inside = np.where(reduced, size_bytes * (1 + 1 / here), bus_bytes * (1 - far / here))
        together = here > 1
        entries.add_ports(layout.flat[together], inside[together])
        if remote.any():
            part = (np.repeat(outside, layout.num_ranks) / here)[far]
            entries.add_rails(layout.flat[far], part)
            if self.cluster.domain_gpus == self.cluster.gpus_per_node:
                of, node, following = layout.neighbours(remote)
                entries.add_uplinks(node, outside[of], into=following)
            else:  # a domain receives as much as it sends, by the nodes of the same members
                nodes = layout.flat[far] // self.cluster.gpus_per_node
                entries.add_uplinks(nodes, part, into=nodes)

    def _add_all_to_all(self, entries: _Entries, layout: Layout, *, size_bytes: float) -> None:
        part, here = size_bytes / layout.num_ranks, layout.here
        together, far = here > 1, layout.per_member(layout.num_nodes > 1)
        entries.add_ports(layout.flat[together], part * (here[together] - 1))
        if far.any():
            ranks, outside = layout.flat[far], part * (layout.num_ranks - here[far])
            entries.add_rails(ranks, outside)
            per_leaf = self.links.nodes_per_leaf * self.cluster.gpus_per_node
            below = Layout(layout.members, per_leaf).here[far] if per_leaf else layout.num_ranks
            beyond = part * (layout.num_ranks - below)
            entries.add_to_all(ranks // self.cluster.gpus_per_node, outside, beyond_leaf=beyond)

    def _checked(self, ranks: Ints) -> Ints:
        ranks = np.asarray(ranks, dtype=np.int64)
        for rank in (int(ranks.min(initial=0)), int(ranks.max(initial=0))):
            self.cluster.node(rank)
            if rank >= self.links.num_nodes * self.cluster.gpus_per_node:
                raise CostModelError(
                    where=self.cluster.name,
                    field="rank",
                    value=rank,
                    rule=f"lies outside of the {self.links.num_nodes} nodes of the job",
                    fix="give num_ranks of the whole job",
                )
        return ranks


class _Entries:
    """Collects links and the bytes that cross them."""

    def __init__(self, links: Links) -> None:
        self._map = links
        self._links: list[Ints] = [np.zeros(0, dtype=np.int64)]
        self._bytes: list[Floats] = [np.zeros(0)]

    def add(self, links: Ints, size_bytes: float | Floats) -> None:
        self._links.append(links)
        self._bytes.append(np.broadcast_to(np.asarray(size_bytes, dtype=np.float64), links.shape))

    def add_ports(self, ranks: Ints, size_bytes: float | Floats, *, into: Ints | None = None) -> None:
        into = ranks if into is None else into
        self.add(self._map.ports(LinkKind.PORT_OUT, ranks), size_bytes)
        self.add(self._map.ports(LinkKind.PORT_IN, into), size_bytes)
        if LinkKind.BUS_OUT in self._map.ranges:
            self.add(self._map.buses(LinkKind.BUS_OUT, ranks), size_bytes)
            self.add(self._map.buses(LinkKind.BUS_IN, into), size_bytes)

    def add_rails(self, ranks: Ints, size_bytes: float | Floats, *, into: Ints | None = None) -> None:
        first, then = self._map.ranges[LinkKind.RAIL_OUT].start, self._map.ranges[LinkKind.RAIL_IN].start
        self.add(first + self._map.rails(ranks), size_bytes)
        self.add(then + self._map.rails(ranks if into is None else into), size_bytes)

    def add_uplinks(self, nodes: Ints, size_bytes: float | Floats, *, into: Ints) -> None:
        """Add bytes from each of `nodes` to one of `into`, through the spine where leaves differ."""
        self.add(self._map.uplinks(LinkKind.UPLINK_OUT, nodes), size_bytes)
        self.add(self._map.uplinks(LinkKind.UPLINK_IN, into), size_bytes)
        per_leaf = self._map.nodes_per_leaf
        if per_leaf:
            across = nodes // per_leaf != into // per_leaf
            size = np.broadcast_to(size_bytes, nodes.shape)[across]
            self.add(self._map.leaves(LinkKind.LEAF_OUT, nodes[across]), size)
            self.add(self._map.leaves(LinkKind.LEAF_IN, into[across]), size)

    def add_to_all(self, nodes: Ints, size_bytes: Floats, *, beyond_leaf: float | Floats) -> None:
        """Add bytes that each of `nodes` exchanges with all others, and those for other leaves."""
        self.add(self._map.uplinks(LinkKind.UPLINK_OUT, nodes), size_bytes)
        self.add(self._map.uplinks(LinkKind.UPLINK_IN, nodes), size_bytes)
        if self._map.nodes_per_leaf:
            self.add(self._map.leaves(LinkKind.LEAF_OUT, nodes), beyond_leaf)
            self.add(self._map.leaves(LinkKind.LEAF_IN, nodes), beyond_leaf)

    def use(self, *, latency_s: float, processors: int, memory_bytes: float) -> CommunicationUse:
        return CommunicationUse(
            latency_s=latency_s,
            processors=processors,
            memory_bytes=float(memory_bytes),
            links=np.concatenate(self._links),
            link_bytes=np.concatenate(self._bytes),
        )


def _used(channels: int, size_bytes: int, part_bytes: int) -> int:
    """Return the channels that are used where each takes a part of at least so many bytes."""
    return max(1, min(channels, math.ceil(size_bytes / part_bytes)))


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()

"""What transfers, collectives and host copies hold of a cluster (times: `models/collectives.py`).

[Note: bytes over links]
Rings: a member sends the bus bytes to its neighbour. Of a set over several nodes, the rings leave each node
by another of its k members: 1/k of a member's bytes go over its rail, the rest over NVLink, and every node
sends the bus bytes to the next one. Reduction in the switch: a member sends its buffer for reduction and its
part of the result for distribution, and receives as much: size (1 + 1/k); over two nodes as a tree, each node
sends size bytes to the other over the rails of its members. All-to-all: a member sends size / n to every
other one. Ring shifts and transfers: the message, over the links on its way.

[Note: bytes in memory]
What is sent is read once, what is received is written once: 2 bytes per bus byte. Where a ring reduces, it
reads what it received and its own part and writes the sum to the next member: 3; all-reduce is one half of
each. Reduction in the switch reads and writes the buffer once: 2 per byte of the buffer.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from cost_models.errors import CostModelError
from cost_models.links import Links
from cost_models.models.collectives import Alone, Collectives, bus_factor
from cost_models.price import CollectiveKind
from cost_models.topology import Cluster, Spread
from cost_models.use import CommunicationUse, LinkKind

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MEMORY_PER_BUS_BYTE = {
    CollectiveKind.ALL_REDUCE: 2.5,
    CollectiveKind.REDUCE_SCATTER: 3.0,
    CollectiveKind.ALL_GATHER: 2.0,
    CollectiveKind.ALL_TO_ALL: 2.0,
    CollectiveKind.RING_SHIFT: 2.0,
}
"""See [Note: bytes in memory]."""


class Loads:
    """What the communication of a job holds.

    Args:
        cluster: what the ranks run on.
        num_ranks: of the job.
    """

    def __init__(self, cluster: Cluster, *, num_ranks: int) -> None:
        self.cluster = cluster
        self.links = Links(cluster, num_ranks)
        self._collectives = Collectives(cluster)

    def transfer(self, *, size_bytes: int, pairs: Ints) -> CommunicationUse:
        """Return what transfers of `size_bytes` hold that run at once; pairs: int64 [n, 2], from and to."""
        pairs = self._checked(pairs)
        nodes = pairs // self.cluster.gpus_per_node
        near = nodes[:, 0] == nodes[:, 1]
        times = [
            self._collectives.alone_transfer(size_bytes, inside=inside)
            for inside, some in ((True, near.any()), (False, not near.all()))
            if some
        ]
        load = _Load()
        self._add_messages(load, pairs[:, 0], pairs[:, 1], size_bytes=size_bytes)
        sharing = self.cluster.sharing
        return load.use(
            latency_s=_slowest(times).latency_s,
            processors=sharing.transfer_processors if near.all() else sharing.network_transfer_processors,
            memory_bytes=size_bytes,
            weight=sharing.ring_connections if near.all() else sharing.peer_connections,
        )

    def collective(self, kind: CollectiveKind, *, size_bytes: int, members: Ints) -> CommunicationUse:
        """Return what a collective of several sets of ranks holds; members: int64 [sets, n]."""
        group = _Group(self._checked(members), self.cluster.gpus_per_node)
        spreads = group.spreads(shift=kind is CollectiveKind.RING_SHIFT)
        num_ranks = group.num_ranks
        load = _Load()
        if num_ranks == 1:
            return load.use(latency_s=0.0, processors=0, memory_bytes=0.0, weight=1.0)
        slowest = max(
            (self._collectives.alone(kind, size_bytes, spread) for spread in spreads),
            key=lambda alone: alone.seconds,
        )
        in_switch = self._collectives.in_switch(kind, spreads[0])
        bus_bytes = size_bytes * bus_factor(kind, num_ranks)
        if kind is CollectiveKind.RING_SHIFT:
            self._add_messages(
                load, group.flat, np.roll(group.members, -1, axis=1).ravel(), size_bytes=size_bytes
            )
        elif kind is CollectiveKind.ALL_TO_ALL:
            self._add_all_to_all(load, group, size_bytes)
        elif in_switch:
            self._add_in_switch(load, group, size_bytes)
        else:
            self._add_ring(load, group, bus_bytes)
        memory = 2.0 * size_bytes if in_switch else _MEMORY_PER_BUS_BYTE[kind] * bus_bytes
        remote = any(spread.num_nodes > 1 for spread in spreads)
        processors, weight = self._kernel(kind, remote=remote, in_switch=in_switch)
        if kind is CollectiveKind.ALL_TO_ALL and remote:
            weight *= num_ranks - min(spread.fewest for spread in spreads)
        return load.use(
            latency_s=slowest.latency_s, processors=processors, memory_bytes=memory, weight=weight
        )

    def host_copy(self, *, size_bytes: int, ranks: Ints, to_host: bool) -> CommunicationUse:
        """Return what copies between devices and their host hold: a copy engine needs no processors."""
        ranks = self._checked(ranks)
        link = self.cluster.gpu.host_link
        load = _Load()
        if link is not None:
            kind = LinkKind.HOST_OUT if to_host else LinkKind.HOST_IN
            load.add(self.links.ports(kind, ranks), size_bytes)
        return load.use(
            latency_s=link.latency_s if link else 0.0, processors=0, memory_bytes=size_bytes, weight=1.0
        )

    def _kernel(self, kind: CollectiveKind, *, remote: bool, in_switch: bool) -> tuple[int, float]:
        """Return the processors and connections of a collective."""
        sharing = self.cluster.sharing
        if kind is CollectiveKind.ALL_TO_ALL:
            return sharing.all_to_all_processors, sharing.peer_connections if remote else 1.0 * (
                sharing.ring_connections
            )
        if kind is CollectiveKind.RING_SHIFT:
            if remote:
                return sharing.network_transfer_processors, sharing.peer_connections
            return sharing.transfer_processors, sharing.ring_connections
        processors = sharing.network_ring_processors if remote else sharing.ring_processors
        return sharing.in_switch_processors if in_switch else processors, sharing.ring_connections

    def _add_messages(self, load: _Load, source: Ints, target: Ints, *, size_bytes: float) -> None:
        """Add one message from each source to its target."""
        from_node, to_node = source // self.cluster.gpus_per_node, target // self.cluster.gpus_per_node
        near = from_node == to_node
        load.add(self.links.ports(LinkKind.PORT_OUT, source[near]), size_bytes)
        load.add(self.links.ports(LinkKind.PORT_IN, target[near]), size_bytes)
        if near.all():
            return
        far = ~near
        load.add(self.links.rails(LinkKind.RAIL_OUT, source[far]), size_bytes)
        load.add(self.links.rails(LinkKind.RAIL_IN, target[far]), size_bytes)
        self._add_between_nodes(load, from_node[far], to_node[far], size_bytes=size_bytes)

    def _add_between_nodes(self, load: _Load, source: Ints, target: Ints, *, size_bytes: float) -> None:
        """Add bytes from each node `source` to its `target`: uplinks, and the spine between leaves."""
        load.add(self.links.uplinks(LinkKind.UPLINK_OUT, source), size_bytes)
        load.add(self.links.uplinks(LinkKind.UPLINK_IN, target), size_bytes)
        per_leaf = self.links.nodes_per_leaf
        if per_leaf:
            across = source // per_leaf != target // per_leaf
            load.add(self.links.leaves(LinkKind.LEAF_OUT, source[across]), size_bytes)
            load.add(self.links.leaves(LinkKind.LEAF_IN, target[across]), size_bytes)

    def _add_ring(self, load: _Load, group: _Group, bus_bytes: float) -> None:
        here = group.here
        self._add_ports(load, group.flat[here > 1], (bus_bytes * (1 - group.remote / here))[here > 1])
        self._add_network_ring(load, group, bus_bytes)

    def _add_in_switch(self, load: _Load, group: _Group, size_bytes: float) -> None:
        here = group.here
        self._add_ports(load, group.flat[here > 1], (size_bytes * (1 + 1 / here))[here > 1])
        self._add_network_ring(load, group, size_bytes)

    def _add_ports(self, load: _Load, ranks: Ints, size_bytes: Floats) -> None:
        load.add(self.links.ports(LinkKind.PORT_OUT, ranks), size_bytes)
        load.add(self.links.ports(LinkKind.PORT_IN, ranks), size_bytes)

    def _add_network_ring(self, load: _Load, group: _Group, size_bytes: float) -> None:
        """Add what each node sends to the next one, in equal parts over the rails of its members there."""
        remote = group.remote
        if not remote.any():
            return
        far, part = group.flat[remote], size_bytes / group.here[remote]
        load.add(self.links.rails(LinkKind.RAIL_OUT, far), part)
        load.add(self.links.rails(LinkKind.RAIL_IN, far), part)
        source, target = group.neighbours
        self._add_between_nodes(load, source, target, size_bytes=size_bytes)

    def _add_all_to_all(self, load: _Load, group: _Group, size_bytes: float) -> None:
        part = size_bytes / group.num_ranks
        here = group.here
        self._add_ports(load, group.flat[here > 1], part * (here[here > 1] - 1.0))
        remote = group.remote
        if not remote.any():
            return
        far, size = group.flat[remote], part * (group.num_ranks - here[remote])
        nodes = far // self.cluster.gpus_per_node
        load.add(self.links.rails(LinkKind.RAIL_OUT, far), size)
        load.add(self.links.rails(LinkKind.RAIL_IN, far), size)
        load.add(self.links.uplinks(LinkKind.UPLINK_OUT, nodes), size)
        load.add(self.links.uplinks(LinkKind.UPLINK_IN, nodes), size)
        per_leaf = self.links.nodes_per_leaf
        if per_leaf:
            below = _Group(group.members, self.cluster.gpus_per_node * per_leaf).here[remote]
            size = part * (group.num_ranks - below)
            load.add(self.links.leaves(LinkKind.LEAF_OUT, nodes), size)
            load.add(self.links.leaves(LinkKind.LEAF_IN, nodes), size)

    def _checked(self, ranks: Ints) -> Ints:
        ranks = np.asarray(ranks, dtype=np.int64)
        if ranks.size:
            for rank in (int(ranks.min()), int(ranks.max())):
                self.cluster.node(rank)
            if ranks.max() >= self.links.num_nodes * self.cluster.gpus_per_node:
                raise CostModelError(
                    where=self.cluster.name,
                    field="ranks",
                    value=int(ranks.max()),
                    rule=f"lies outside of the {self.links.num_nodes} nodes of the job",
                    fix="give num_ranks of the whole job",
                )
        return ranks


def _slowest(times: list[Alone]) -> Alone:
    return max(times, key=lambda alone: alone.seconds)


class _Load:
    """Collects entries of links and bytes."""

    def __init__(self) -> None:
        self._links: list[Ints] = [np.zeros(0, dtype=np.int64)]
        self._bytes: list[Floats] = [np.zeros(0)]

    def add(self, links: Ints, size_bytes: float | Floats) -> None:
        self._links.append(links)
        self._bytes.append(np.broadcast_to(np.asarray(size_bytes, dtype=np.float64), links.shape))

    def use(
        self, *, latency_s: float, processors: int, memory_bytes: float, weight: float
    ) -> CommunicationUse:
        return CommunicationUse(
            latency_s=latency_s,
            processors=processors,
            memory_bytes=float(memory_bytes),
            weight=weight,
            links=np.concatenate(self._links),
            link_bytes=np.concatenate(self._bytes),
        )


class _Group:
    """Where the members of all sets lie.

    Args:
        members: int64 [sets, n].
        per_node: devices of a node.
    """

    def __init__(self, members: Ints, per_node: int) -> None:
        self.members = members
        self.num_sets, self.num_ranks = members.shape
        self.flat = members.ravel()
        self._nodes = members // per_node
        most = int(self._nodes.max(initial=0)) + 1
        key = (self._nodes + np.arange(self.num_sets)[:, None] * most).ravel()
        self._keys, self._of, self._counts = np.unique(key, return_inverse=True, return_counts=True)
        self._set, self._node = self._keys // most, self._keys % most
        self._first = np.flatnonzero(np.diff(self._set, prepend=-1))
        self._num_nodes = np.diff(self._first, append=len(self._set))

    @cached_property
    def here(self) -> Ints:
        """Return the members of its set on the node of each member: int64 [sets x n]."""
        here: Ints = self._counts[self._of]
        return here

    @cached_property
    def remote(self) -> npt.NDArray[np.bool_]:
        """Tell for each member whether its set lies on several nodes: bool [sets x n]."""
        return np.repeat(self._num_nodes > 1, self.num_ranks)

    @property
    def neighbours(self) -> tuple[Ints, Ints]:
        """Return each node of each set over several nodes, and the next one of its ring."""
        following = np.arange(1, len(self._set) + 1)
        following[self._first + self._num_nodes - 1] = self._first
        far = np.repeat(self._num_nodes > 1, self._num_nodes)
        return self._node[far], self._node[following][far]

    def spreads(self, *, shift: bool) -> list[Spread]:
        """Return the ways in which sets lie; shift: also by the members that leave a node together."""
        fewest = np.minimum.reduceat(self._counts, self._first)
        most = np.maximum.reduceat(self._counts, self._first)
        columns = [self._num_nodes, fewest, most]
        if shift:
            leaves = (self._nodes != np.roll(self._nodes, -1, axis=1)).ravel()
            leaving = np.bincount(self._of[leaves], minlength=len(self._keys))
            columns.append(np.maximum(np.maximum.reduceat(leaving, self._first), 1))
        packed = np.zeros(self.num_sets, dtype=np.int64)
        for column in columns:
            packed = packed * (self.num_ranks + 1) + column
        _, chosen = np.unique(packed, return_index=True)
        rows = np.stack(columns, axis=1)[np.sort(chosen)].tolist()
        return [
            Spread(
                num_ranks=self.num_ranks,
                num_nodes=row[0],
                fewest=row[1],
                most=row[2],
                leaving=row[3] if shift else 1,
            )
            for row in rows
        ]

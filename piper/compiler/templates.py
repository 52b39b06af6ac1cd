"""What one pipeline rank does per microbatch, before anybody says when: independent of the order row.

[Note: templates until here]
Blocks, buffers and waits are made once per kind of microbatch (its size, and the blocks it has on this
device) and then repeated for all microbatches of the kind by array arithmetic: the cost is one small
constant per task, and a changed order changes only numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from piper.compiler.blocks import BlockKey, BlockMaker, Entry
from piper.compiler.columns import Numbers
from piper.compiler.liveness import Buffer, Liveness, message_bytes
from piper.compiler.local import LocalModel
from piper.compiler.works import WorkTable
from piper.graph import EdgeKind, Graph, Node
from simulator.plan import COLLECTIVE_KINDS, COMPUTE_KINDS, NONE

COMPUTE = "compute"
"""Name of stream 0."""

_COLUMNS = (
    "kind", "stage", "first_segment", "last_segment", "part", "phase", "stream", "work", "peer", "edge",
    "group", "size_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KindTemplate:
    """The tasks of one kind of microbatch.

    Args:
        nodes: their templates, in the order of the blocks.
        anchors: int64 [nodes], the compute task (counted over all blocks of the kind) each is or follows.
        lanes: int64 [nodes], order around the anchor.
        columns: field -> int64 [nodes, 1].
        waits: int64 [2, waits], (node, node it waits for).
        buffers: what comes to life.
        allocates, reads, frees: int64 [2, ...], (node, buffer).
    """

    nodes: tuple[Node, ...]
    anchors: Numbers
    lanes: Numbers
    columns: Mapping[str, Numbers]
    waits: Numbers
    buffers: tuple[Buffer, ...]
    allocates: Numbers
    reads: Numbers
    frees: Numbers


@dataclass(kw_only=True)
class DeviceTemplates:
    """Templates of one pipeline rank, made on demand and kept.

    Args:
        graph: after all passes; its rows and microbatches are not read.
        pipeline_rank: which.
        works: price keys, shared by all ranks.
        locals_: what a rank of this device holds, by microbatch size (of the job's mesh).
        groups: number of each rank group by name.
        place: of every node by uid, in one topological order for all ranks.
    """

    graph: Graph
    pipeline_rank: int
    works: WorkTable
    locals_: Mapping[int, LocalModel]
    groups: Mapping[str, int]
    place: Mapping[str, int]
    _kinds: dict[tuple[int, tuple[BlockKey, ...]], KindTemplate] = field(default_factory=dict)

    @cached_property
    def own(self) -> tuple[Node, ...]:
        """Return the nodes of this device."""
        return tuple(n for n in self.graph.nodes if n.pipeline_rank == self.pipeline_rank)

    @cached_property
    def streams(self) -> Mapping[str, int]:
        """Return the number of each stream by name."""
        names = dict.fromkeys((COMPUTE, *(node.stream for node in self.own)))
        return {name: number for number, name in enumerate(names)}

    @cached_property
    def maker(self) -> BlockMaker:
        """Return the maker of this device's blocks."""
        return BlockMaker(graph=self.graph, pipeline_rank=self.pipeline_rank)

    def kind(self, size: int, keys: tuple[BlockKey, ...]) -> KindTemplate:
        """Return the template of microbatches of `size` sequences with these blocks, in this order."""
        if (size, keys) not in self._kinds:
            self._kinds[size, keys] = self._make(size, keys)
        return self._kinds[size, keys]

    def _make(self, size: int, keys: tuple[BlockKey, ...]) -> KindTemplate:
        entries: list[Entry] = []
        anchors: list[int] = []
        first = 0
        for block in self.maker.blocks(keys):
            entries += block.entries
            anchors += [first + max(entry.anchor, 0) for entry in block.entries]
            first += block.num_compute
        nodes = tuple(entry.node for entry in entries)
        buffers = tuple(Liveness(graph=self.graph, local=self.locals_[size], nodes=nodes).buffers())
        lasts = [(buffer.touches[-1], number) for number, buffer in enumerate(buffers)]
        return KindTemplate(
            nodes=nodes,
            anchors=np.array(anchors, dtype=np.int64),
            lanes=np.array([entry.lane for entry in entries], dtype=np.int64),
            columns=self._columns(nodes, size),
            waits=_pairs(sorted(self._waits(nodes) | _waits_to_free(nodes, buffers))),
            buffers=buffers,
            allocates=_pairs([(buffer.touches[0], number) for number, buffer in enumerate(buffers)]),
            reads=_pairs([(t, n) for n, b in enumerate(buffers) for t in b.touches[1:] or b.touches]),
            frees=_pairs(lasts),
        )

    def _columns(self, nodes: Sequence[Node], size: int) -> dict[str, Numbers]:
        local = self.locals_[size]
        rows = [
            (
                int(node.kind),
                node.stage,
                node.first_segment,
                node.last_segment,
                self.maker.part(node),
                self.maker.phase(node),
                self.streams[node.stream],
                self.works.of_compute(node, size) if node.kind in COMPUTE_KINDS else NONE,
                node.peer,
                node.edge,
                self.groups[node.group] if node.kind in COLLECTIVE_KINDS else NONE,
                0 if node.kind in COMPUTE_KINDS else message_bytes(self.graph, local, node),
            )
            for node in nodes
        ]
        columns = np.array(rows, dtype=np.int64)
        return {name: columns[:, i : i + 1] for i, name in enumerate(_COLUMNS)}

    def _waits(self, nodes: Sequence[Node]) -> set[tuple[int, int]]:
        """Return, per node, the last one on each other stream that it comes after in its microbatch."""
        position = {node.uid: i for i, node in enumerate(nodes)}
        found: set[tuple[int, int]] = set()
        for i, node in enumerate(nodes):
            latest: dict[tuple[str, int], int] = {}
            for edge in self.graph.incoming.get(node.uid, ()):
                source = position.get(edge.source)
                if source is not None and edge.kind is not EdgeKind.PREVIOUS_STEP:
                    # Receives keep the order of their sends, which the template does not know.
                    key = (nodes[source].stream, nodes[source].edge)
                    latest[key] = max(latest.get(key, NONE), source)
            found |= {(i, source) for (stream, _), source in latest.items() if stream != node.stream}
        return found


def _waits_to_free(nodes: Sequence[Node], buffers: Sequence[Buffer]) -> set[tuple[int, int]]:
    """Return what the last reader of a buffer waits for: those who read it on other streams."""
    found: set[tuple[int, int]] = set()
    for buffer in buffers:
        last = buffer.touches[-1]
        latest = {nodes[touch].stream: touch for touch in buffer.touches[1:-1]}
        found |= {(last, touch) for stream, touch in latest.items() if stream != nodes[last].stream}
    return found


def _pairs(pairs: Sequence[tuple[int, int]]) -> Numbers:
    return np.array(pairs, dtype=np.int64).reshape(-1, 2).T

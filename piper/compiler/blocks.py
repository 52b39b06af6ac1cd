"""Blocks: everything that one pass of one stage does for one microbatch, as templates in dispatch order.

[Note: blocks]
A block is F, B, BI or BW of a stage: its receives, its compute tasks with their recomputation, the
exchanges between these, its sends. Compute tasks keep the order of the model (B: against it). All else is
anchored: dispatched right after the compute task that it follows, or before the first one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heappop, heappush

from cost_models.errors import check_invariant
from piper.graph import EdgeKind, Graph, Node
from simulator.plan import COMPUTE_KINDS, NONE, RECV_KINDS, SEND_KINDS, TaskKind

BlockKey = tuple[int, TaskKind]
"""Stage and F, B, BI or BW."""

RECEIVE, BEFORE, COMPUTE, AFTER, SEND, REDUCE = 0, 1, 5, 6, 10, 12
"""Lanes: what is dispatched first around one compute task."""
LANES = 16
_FIRST = 2**60
_PASS = {TaskKind.F: TaskKind.F, TaskKind.B: TaskKind.B, TaskKind.BI: TaskKind.B, TaskKind.BW: TaskKind.BW}
_OTHER = {TaskKind.B: TaskKind.BI, TaskKind.BI: TaskKind.B}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One task of a block.

    Args:
        node: its template.
        anchor: the compute task (counted within the block) that it is or follows; -1: before the first.
        lane: order around the anchor.
    """

    node: Node
    anchor: int
    lane: int


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block as entries, receives first, then by (anchor, lane)."""

    key: BlockKey
    entries: tuple[Entry, ...]

    @cached_property
    def index(self) -> dict[str, int]:
        """Return the position of each node."""
        return {entry.node.uid: i for i, entry in enumerate(self.entries)}

    @cached_property
    def num_compute(self) -> int:
        """Return how many compute tasks it has."""
        return sum(entry.lane == COMPUTE for entry in self.entries)


@dataclass(kw_only=True)
class BlockMaker:
    """Blocks of one pipeline rank, made on demand."""

    graph: Graph
    pipeline_rank: int
    _made: dict[BlockKey, Block] = field(default_factory=dict)

    def block(self, key: BlockKey) -> Block:
        """Return the block of a stage and pass."""
        if key not in self._made:
            self._made[key] = self._make(key)
        return self._made[key]

    def part(self, node: Node) -> int:
        """Return the `part` of a node's tasks (`simulator.plan.Task`)."""
        if node.kind in COMPUTE_KINDS:
            whole = (node.first_segment, node.last_segment) == self._span(node.stage)
            return NONE if whole else node.first_segment
        if node.kind in SEND_KINDS | RECV_KINDS:
            alike = [n for n in self._nodes[node.stage, node.pass_kind] if n.kind is node.kind]
            return node.edge if len(alike) > 1 else NONE
        if node.is_regrouping:
            alike = [n for n in self._nodes[node.stage, node.pass_kind] if n.is_regrouping]
            sources = (self.graph.node[uid] for uid in self._sources(node))
            return min(n.edge for n in sources if n.kind in RECV_KINDS) if len(alike) > 1 else NONE
        leaves = node.is_exchange and bool(node.values) and not node.enters
        return node.region[1] + 1 if leaves else node.region[0]

    def phase(self, node: Node) -> int:
        """Return the `phase` of a node's tasks: what brings tensors back right before a B serves that B."""
        if node.phase is not TaskKind.R or node.kind is not TaskKind.ALL_GATHER:
            return NONE if node.phase is None else int(node.phase)
        after = [self.graph.node[edge.target] for edge in self.graph.outgoing.get(node.uid, ())]
        remakes = any(TaskKind.R in {target.kind, target.phase} for target in after)
        return int(TaskKind.R if remakes else TaskKind.B)

    def _span(self, stage: int) -> tuple[int, int]:
        forward = self._nodes[stage, TaskKind.F]
        covered = [n for n in forward if n.kind is TaskKind.F]
        return min(n.first_segment for n in covered), max(n.last_segment for n in covered)

    @cached_property
    def _nodes(self) -> dict[tuple[int, TaskKind], list[Node]]:
        found: dict[tuple[int, TaskKind], list[Node]] = {}
        for node in self.graph.nodes:
            if node.pipeline_rank == self.pipeline_rank and node.per_microbatch and not node.bucket:
                found.setdefault((node.stage, node.pass_kind), []).append(node)
        return found

    def _make(self, key: BlockKey) -> Block:
        stage, kind = key
        nodes = [n for n in self._nodes.get((stage, _PASS[kind]), ()) if n.kind is not _OTHER.get(kind)]
        compute = self._compute(nodes)
        rank = {node.uid: i for i, node in enumerate(compute)}
        entries = [Entry(node=n, anchor=rank[n.uid], lane=COMPUTE) for n in compute]
        receives = [n for n in nodes if n.kind in RECV_KINDS]
        entries += [Entry(node=n, anchor=NONE, lane=RECEIVE) for n in sorted(receives, key=lambda n: n.edge)]
        others = {n.uid: n for n in nodes if n.kind not in COMPUTE_KINDS | RECV_KINDS}
        place = {entry.node.uid: (entry.anchor, entry.lane) for entry in entries}
        for node in self._in_flow(others):
            place[node.uid] = self._place(node, place)
            entries.append(Entry(node=node, anchor=place[node.uid][0], lane=place[node.uid][1]))
        return Block(key=key, entries=tuple(sorted(entries, key=lambda e: (e.anchor, e.lane))))

    def _compute(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the compute tasks in an order that edges allow, else along the model (B: against it)."""
        inside = {n.uid: n for n in nodes}
        waiting = {uid: sum(source in inside for source in self._sources(n)) for uid, n in inside.items()}
        ready = [(*_compute_order(n), uid) for uid, n in inside.items() if not waiting[uid]]
        heapify(ready)
        found: list[Node] = []
        while ready:
            uid = heappop(ready)[-1]
            if inside[uid].kind in COMPUTE_KINDS:
                found.append(inside[uid])
            for edge in self.graph.outgoing.get(uid, ()):
                if edge.target in inside and edge.kind is not EdgeKind.PREVIOUS_STEP:
                    waiting[edge.target] -= 1
                    if not waiting[edge.target]:
                        heappush(ready, (*_compute_order(inside[edge.target]), edge.target))
        return found

    def _in_flow(self, others: dict[str, Node]) -> Iterable[Node]:
        """Yield exchanges and sends so that what feeds another comes first."""
        waiting = dict(others)
        while waiting:
            ready = [
                n
                for uid, n in waiting.items()
                if not any(s in waiting and s != uid for s in self._sources(n))
            ]
            check_invariant(bool(ready), f"exchanges wait for each other: {sorted(waiting)[:4]}")
            for node in sorted(ready, key=lambda n: (n.edge, n.uid)):
                del waiting[node.uid]
                yield node

    def _sources(self, node: Node) -> list[str]:
        incoming = self.graph.incoming.get(node.uid, ())
        return [edge.source for edge in incoming if edge.kind is not EdgeKind.PREVIOUS_STEP]

    def _place(self, node: Node, place: dict[str, tuple[int, int]]) -> tuple[int, int]:
        """Return (anchor, lane): behind the last source within the block."""
        sources = [place[uid] for uid in self._sources(node) if uid in place]
        if node.kind is TaskKind.RELOAD:
            targets = [place[e.target][0] for e in self.graph.outgoing[node.uid] if e.target in place]
            return min(targets), BEFORE
        anchor, lane = max(sources, default=(NONE, BEFORE))
        if node.kind in SEND_KINDS:
            return anchor, SEND
        if anchor == NONE:
            return anchor, max(lane + 1, BEFORE)
        return anchor, max(AFTER, lane + 1)


def _compute_order(node: Node) -> tuple[int, bool]:
    """Return what comes first among tasks that are ready; exchanges at once."""
    if node.kind not in COMPUTE_KINDS:
        return -_FIRST, False
    if node.kind in {TaskKind.F, TaskKind.BW}:
        return (node.first_segment if node.kind is TaskKind.F else -node.first_segment), False
    return -node.first_segment, node.kind is not TaskKind.R

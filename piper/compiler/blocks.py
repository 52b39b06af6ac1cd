"""Blocks: everything that one pass of one stage does for one microbatch, as templates in dispatch order.

[Note: blocks]
A block is F, B, BI or BW of a stage, or of a part of one ([Note: parts]): its receives, its compute tasks
with their recomputation, the exchanges between these, its sends. Compute tasks keep the order of the model
(B: against it). All else is anchored: dispatched right after the compute task that it follows, or before the
first one of the block that needs it. What follows or serves which part depends on the order of the parts, so
the blocks of a microbatch are made together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import accumulate

from cost_models.errors import check_invariant
from piper.graph import EdgeKind, Graph, Node
from piper.graph.parts import Parts
from simulator.plan import COMPUTE_KINDS, NONE, RECV_KINDS, SEND_KINDS, TaskKind

BlockKey = tuple[int, TaskKind, int]
"""Stage; F, B, BI or BW; first segment of the part, or NONE: the whole stage."""

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
    _made: dict[tuple[BlockKey, ...], tuple[Block, ...]] = field(default_factory=dict)
    _ordered: dict[tuple[int, TaskKind], list[Node]] = field(default_factory=dict)

    def blocks(self, keys: Sequence[BlockKey]) -> list[Block]:
        """Return the blocks of a microbatch, given in the order of its row."""
        passes: dict[tuple[int, TaskKind], list[BlockKey]] = {}
        for key in keys:
            passes.setdefault(key[:2], []).append(key)
        found: dict[BlockKey, Block] = {}
        for parts in map(tuple, passes.values()):
            if parts not in self._made:
                self._made[parts] = self._make(parts)
            found |= zip(parts, self._made[parts], strict=True)
        return [found[key] for key in keys]

    def compute(self, key: BlockKey) -> list[Node]:
        """Return the compute tasks of a block, in order; an R belongs to the part that needs it first."""
        stage, kind, part = key
        if (stage, kind) not in self._ordered:
            self._ordered[stage, kind] = self._compute(self._of_pass(stage, kind))
        ordered = self._ordered[stage, kind]
        if part == NONE:
            return ordered
        later = [start for start in self._parts.of(kind, stage) if start > part]
        end = later[0] if later else self._span(stage)[1] + 1
        needed = {n.uid: i for i, n in enumerate(ordered) if n.kind is not TaskKind.R}
        homes = [n if n.uid in needed else ordered[self._first_use(n, needed)] for n in ordered]
        return [n for n, home in zip(ordered, homes, strict=True) if part <= home.first_segment < end]

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
        if stage not in self._spans:
            covered = [n for n in self._nodes[stage, TaskKind.F] if n.kind is TaskKind.F]
            borders = min(n.first_segment for n in covered), max(n.last_segment for n in covered)
            self._spans[stage] = borders
        return self._spans[stage]

    @cached_property
    def _spans(self) -> dict[int, tuple[int, int]]:
        return {}

    @cached_property
    def _nodes(self) -> dict[tuple[int, TaskKind], list[Node]]:
        found: dict[tuple[int, TaskKind], list[Node]] = {}
        for node in self.graph.nodes:
            if node.pipeline_rank == self.pipeline_rank and node.per_microbatch and not node.bucket:
                found.setdefault((node.stage, node.pass_kind), []).append(node)
        return found

    @cached_property
    def _parts(self) -> Parts:
        return Parts(graph=self.graph)

    def _of_pass(self, stage: int, kind: TaskKind) -> list[Node]:
        return [n for n in self._nodes.get((stage, _PASS[kind]), ()) if n.kind is not _OTHER.get(kind)]

    def _make(self, keys: tuple[BlockKey, ...]) -> tuple[Block, ...]:
        """Return the blocks of one pass, of its parts in the given order."""
        nodes = self._of_pass(*keys[0][:2])
        computes = [self.compute(key) for key in keys]
        starts = list(accumulate(map(len, computes[:-1]), initial=0))
        compute = [node for listed in computes for node in listed]
        rank = {node.uid: i for i, node in enumerate(compute)}
        entries = [Entry(node=n, anchor=rank[n.uid], lane=COMPUTE) for n in compute]
        receives = sorted((n for n in nodes if n.kind in RECV_KINDS), key=lambda n: n.edge)
        entries += [Entry(node=n, anchor=NONE, lane=RECEIVE) for n in receives]
        others = {n.uid: n for n in nodes if n.kind not in COMPUTE_KINDS | RECV_KINDS}
        place = {entry.node.uid: (entry.anchor, entry.lane) for entry in entries}
        use = {node.uid: self._first_use(node, rank) for node in receives}
        for node in self._in_flow(others):
            anchor, lane = place[node.uid] = self._place(node, place)
            entries.append(Entry(node=node, anchor=anchor, lane=lane))
            if anchor == NONE:
                brought = [use[uid] for uid in self._sources(node) if uid in use]
                use[node.uid] = max(brought, default=_first_inside(node.region, compute))
        inside: list[list[Entry]] = [[] for _ in keys]
        for entry in sorted(entries, key=lambda e: (e.anchor, e.lane)):
            number = bisect_right(starts, use.get(entry.node.uid, entry.anchor)) - 1
            inside[number].append(replace(entry, anchor=max(entry.anchor - starts[number], NONE)))
        return tuple(Block(key=key, entries=tuple(found)) for key, found in zip(keys, inside, strict=True))

    def _first_use(self, node: Node, rank: Mapping[str, int]) -> int:
        """Return the first of ranked tasks to which a node leads directly or through others; 0: to none."""
        ways, uses = [node.uid], []
        for uid in ways:
            for edge in self.graph.outgoing.get(uid, ()):
                target = self.graph.node[edge.target]
                if edge.target in rank:
                    uses.append(rank[edge.target])
                elif (target.is_exchange or target.kind is TaskKind.R) and edge.target not in ways:
                    ways.append(edge.target)
        return min(uses, default=0)

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
            # What is made again travels before the gradients that wait for it on the same stream.
            for node in sorted(ready, key=lambda n: (n.edge, n.phase is not TaskKind.R, n.uid)):
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


def _first_inside(region: tuple[int, int], compute: Sequence[Node]) -> int:
    """Return the first of compute tasks that has segments of a region; 0: none has."""
    overlap = (n.first_segment <= region[1] and region[0] <= n.last_segment for n in compute)
    return next((i for i, inside in enumerate(overlap) if inside), 0)


def _compute_order(node: Node) -> tuple[int, bool]:
    """Return what comes first among tasks that are ready; exchanges at once."""
    if node.kind not in COMPUTE_KINDS:
        return -_FIRST, False
    if node.kind in {TaskKind.F, TaskKind.BW}:
        return (node.first_segment if node.kind is TaskKind.F else -node.first_segment), False
    return -node.first_segment, node.kind is not TaskKind.R

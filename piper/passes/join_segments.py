"""Join the segments of a stage into tasks: F and B, and R before the B of what is recomputed."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from piper.graph.buckets import BucketPlanner
from piper.graph.cut import units_of
from piper.graph.graph import EdgeKind, Graph, GraphEdge, Node
from simulator.plan import TaskKind

F, B, R = TaskKind.F, TaskKind.B, TaskKind.R


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSegments:
    """Join what nothing separates, so that a stage costs one launch per pass.

    [Note: islands]
    An island is a run of segments whose gradients are computed by one B; autograd is cut at its borders. A
    stage is divided where an exchange of that pass stands; where a bucket ends, F and B if its parameters are
    cut (ZeRO-3), B alone if `bucket_mb` is stated; and, in B, around each unit that is recomputed.

    [Note: recomputation]
    R makes again what B needs and F threw away: all of a unit, or the results of some kinds of operations
    (selective). Exchanges inside of the unit are made again too.

    rewrite: F.0 -> F.1 -> B.1 -> B.0                     ->  F.0-1 -> B.0-1
             F.0 -> F.1 -> B.1 -> B.0, both recomputed    ->  F.0-1 -> R.1 -> B.1 -> R.0 -> B.0
             F.0 -> X -> F.1 -> B.1 -> B.0                ->  F.0 -> X -> F.1 -> B.0-1
    """

    def apply(self, graph: Graph) -> Graph:
        """Return the graph with joined nodes."""
        runs = _Runs(graph=graph)
        home: dict[str, str] = {}
        joined: list[Node] = []
        for stage in range(graph.num_stages):
            for run in (*runs.forward(stage), *runs.backward(stage)):
                node = _join(run)
                joined.append(node)
                home |= {part.uid: node.uid for part in run}
        joined += [n for n in graph.nodes if n.is_exchange]
        home |= {n.uid: n.uid for n in graph.nodes if n.is_exchange}
        edges = [
            replace(edge, source=home[edge.source], target=home[edge.target])
            for edge in graph.edges
            if home[edge.source] != home[edge.target]
        ]
        bare = replace(graph, nodes=(), edges=())
        return _Recompute(before=graph, runs=runs).inserted(bare.rewrite(add=joined, connect=edges))


@dataclass(frozen=True, kw_only=True)
class _Runs:
    """Which segments belong together."""

    graph: Graph

    def forward(self, stage: int) -> list[list[Node]]:
        """Return the runs of F of a stage, along the data."""
        return _split(self._nodes.get((stage, F), []), lambda n: self._part(n.first_segment, F))

    def backward(self, stage: int) -> list[list[Node]]:
        """Return the islands of a stage, against the data."""
        return _split(self._nodes.get((stage, B), []), self._island)[::-1]

    def remade(self, stage: int, unit: int) -> list[list[Node]]:
        """Return the runs of B nodes of one recomputed unit, divided as its forward is, along the data."""
        inside = [n for n in self._nodes.get((stage, B), []) if self.unit(n) == unit]
        whole = [n for n in inside if n.recomputed or self.selected(n)]
        return _split(whole, lambda n: (self._part(n.first_segment, F), n.recomputed))

    def unit(self, node: Node) -> int:
        """Return the unit of the cut that a segment's node belongs to."""
        return self._units[node.first_segment]

    def selected(self, node: Node) -> bool:
        """Return whether some operations of a segment are made again."""
        return node.first_segment in self._selected

    def _island(self, node: Node) -> Hashable:
        again = node.recomputed or self._unit_is_selected[self.unit(node)]
        unit = self.unit(node) if again else -1
        return self._part(node.first_segment, B), node.recomputed, unit

    def _part(self, segment: int, phase: TaskKind) -> Hashable:
        """Return a number that changes where an exchange of a pass, or the end of a bucket, divides."""
        return self._exchanges[phase][segment], self._buckets[phase][segment]

    @cached_property
    def _nodes(self) -> dict[tuple[int, TaskKind], list[Node]]:
        found: dict[tuple[int, TaskKind], list[Node]] = {}
        for node in self.graph.nodes:
            if not node.is_exchange:
                found.setdefault((node.stage, node.kind), []).append(node)
        return found

    @cached_property
    def _exchanges(self) -> dict[TaskKind, list[int]]:
        """Per pass and segment: how many borders with an exchange lie before it."""
        count = len(self.graph.model.segments)
        found: dict[TaskKind, list[int]] = {}
        for phase in (F, B):
            starts: set[int] = set()
            for node in self.graph.nodes:
                if node.is_exchange and node.phase is phase:
                    beside = node.kind is TaskKind.RING_SHIFT
                    if node.enters or beside:
                        starts.add(node.region[0])
                    if not node.enters or beside:
                        starts.add(node.region[1] + 1)
            total, numbers = 0, []
            for i in range(count):
                total += i in starts
                numbers.append(total)
            found[phase] = numbers
        return found

    @cached_property
    def _buckets(self) -> Mapping[TaskKind, tuple[int, ...]]:
        return BucketPlanner(graph=self.graph).divided

    @cached_property
    def _units(self) -> tuple[int, ...]:
        return units_of(self.graph.model).of_segment

    @cached_property
    def _selected(self) -> frozenset[int]:
        """Segments that have an operation of a kind that is made again."""
        segments = self.graph.model.segments
        return frozenset(
            i
            for fact in self.graph.recomputations
            if fact.mode == "selective"
            for i in fact.segments
            if any(o.kind.value in fact.kinds for o in segments[i].forward.operations)
        )

    @cached_property
    def _unit_is_selected(self) -> dict[int, bool]:
        found = dict.fromkeys(self._units, False)
        return found | {self._units[i]: True for i in self._selected}


@dataclass(frozen=True, kw_only=True)
class _Recompute:
    """Inserts R and the exchanges between several R of a unit.

    Args:
        before: the graph of single segments.
        runs: which belong together.
    """

    before: Graph
    runs: _Runs

    def inserted(self, graph: Graph) -> Graph:
        """Return the joined graph with R before the B that need it."""
        for stage in range(graph.num_stages):
            islands = [n for n in graph.nodes if n.kind is B and n.stage == stage]
            for unit in dict.fromkeys(self._units_of(stage)):
                graph = self._unit(graph, islands, self.runs.remade(stage, unit))
        return graph

    def _units_of(self, stage: int) -> list[int]:
        nodes = [n for n in self.before.nodes if n.kind is B and n.stage == stage]
        return [self.runs.unit(n) for n in nodes[::-1] if n.recomputed or self.runs.selected(n)]

    def _unit(self, graph: Graph, islands: Sequence[Node], runs: Sequence[Sequence[Node]]) -> Graph:
        """Return the graph with the R of one unit: wired as its F, each before the B of its segments."""
        again = {
            run[0].uid: replace(_join(run), uid=_join(run).uid.replace("B.", "R."), kind=R) for run in runs
        }
        inside = {f"F.{n.first_segment}": again[run[0].uid].uid for run in runs for n in run}
        inside |= {uid: f"{uid}.remade" for uid in self._exchanges_between(inside)}
        exchanges = [
            replace(self.before.node[uid], uid=new, phase=R)
            for uid, new in inside.items()
            if self.before.node[uid].is_exchange
        ]
        edges = [
            GraphEdge(inside[e.source], inside[e.target])
            for e in self.before.edges
            if e.source in inside and e.target in inside and inside[e.source] != inside[e.target]
        ]
        fed = {edge.target for edge in edges}
        first = next((b for b in islands if any(_overlap(b, node) for node in again.values())), None)
        for node in again.values():
            edges += [GraphEdge(node.uid, island.uid) for island in islands if _overlap(island, node)]
            if first is None or node.uid in fed:
                continue
            # R may run as soon as its B could: it waits for what B waits for, so that memory stays low.
            edges += [
                GraphEdge(edge.source, node.uid, EdgeKind.TEMPORAL)
                for edge in graph.incoming.get(first.uid, ())
                if graph.node[edge.source].stage == node.stage
            ]
        return graph.rewrite(add=[*again.values(), *exchanges], connect=edges)

    def _exchanges_between(self, inside: Container[str]) -> list[str]:
        """Return the exchanges of the forward on a way between two segments of the unit."""
        forward = [n for n in self.before.nodes if n.is_exchange and n.phase is F]
        return [
            node.uid
            for node in forward
            if self._reaches(node.uid, inside, backwards=True)
            and self._reaches(node.uid, inside, backwards=False)
        ]

    def _reaches(self, uid: str, inside: Container[str], *, backwards: bool) -> bool:
        """Return whether an exchange is fed by (or feeds) a segment inside, directly or through others."""
        edges = (self.before.incoming if backwards else self.before.outgoing).get(uid, ())
        others = [edge.source if backwards else edge.target for edge in edges]
        return any(
            other in inside
            or (self.before.node[other].is_exchange and self._reaches(other, inside, backwards=backwards))
            for other in others
        )


def _again(run: Sequence[Node]) -> Node:
    """Return the R of some B nodes."""
    node = _join(run)
    return replace(node, uid=node.uid.replace("B.", "R."), kind=R)


def _overlap(one: Node, other: Node) -> bool:
    return one.first_segment <= other.last_segment and other.first_segment <= one.last_segment


def _split(nodes: Sequence[Node], key: Callable[[Node], Hashable]) -> list[list[Node]]:
    """Return runs of neighbouring segments with equal keys."""
    return [list(run) for _, run in groupby(nodes, key=key)]


def _join(run: Sequence[Node]) -> Node:
    first, last = run[0], run[-1]
    shared = set(first.tags).intersection(*(n.tags for n in run))
    span = f"{first.first_segment}-{last.last_segment}"
    return replace(
        first,
        uid=f"{first.kind.name}.{span}",
        tags=tuple(sorted(shared)),
        last_segment=last.last_segment,
        recomputed=any(n.recomputed for n in run),
    )

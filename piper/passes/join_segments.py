"""Join the segments of a stage into tasks: F and B, and R before the B of what is recomputed."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby

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
    cut (ZeRO-3), B alone if `bucket_mb` is stated; where rows do ([Note: parts]); and, in B, around each unit
    that is recomputed.

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
        return _split(
            self._nodes.get((stage, F), []),
            lambda n: (self._part(n.first_segment, F), self._row_part[F][n.first_segment]),
        )

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
        number = node.first_segment
        return self._part(number, B), self._row_part[B][number], node.recomputed, unit

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
            found[phase] = _numbered(starts, count=count)
        return found

    @cached_property
    def _row_part(self) -> dict[TaskKind, list[int]]:
        """Per pass and segment: how many borders of rows lie before it or at it."""
        borders, count = self.graph.row_borders, len(self.graph.model.segments)
        return {
            phase: _numbered({i for kind, i in borders if kind is phase}, count=count) for phase in (F, B)
        }

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
        nodes: list[Node] = []
        edges: list[GraphEdge] = []
        islands: dict[int, list[Node]] = {}
        for node in graph.nodes:
            if node.kind is B:
                islands.setdefault(node.stage, []).append(node)
        for stage, unit in self._units:
            remade = self._unit(graph, islands[stage], self.runs.remade(stage, unit))
            nodes += remade[0]
            edges += remade[1]
        return graph.rewrite(add=nodes, connect=edges)

    @property
    def _units(self) -> list[tuple[int, int]]:
        """Stage and unit of all that is made again, stage by stage against the data."""
        found = {
            (n.stage, self.runs.unit(n)): None
            for n in self.before.nodes
            if n.kind is B and (n.recomputed or self.runs.selected(n))
        }
        return sorted(found, key=lambda key: (key[0], -key[1]))

    def _unit(
        self, graph: Graph, islands: Sequence[Node], runs: Sequence[Sequence[Node]]
    ) -> tuple[list[Node], list[GraphEdge]]:
        """Return the R of one unit, wired as its F, each before the B of its segments; with exchanges."""
        again = {run[0].uid: _again(run) for run in runs}
        inside = {f"F.{n.first_segment}": again[run[0].uid].uid for run in runs for n in run}
        between = self._exchanges_between(inside, runs[0][0].stage)
        inside |= {node.uid: f"{node.uid}.remade" for node in between}
        exchanges = [replace(node, uid=inside[node.uid], phase=R) for node in between]
        edges = [
            GraphEdge(inside[e.source], inside[e.target])
            for uid in inside
            for e in self.before.outgoing.get(uid, ())
            if e.target in inside and inside[e.source] != inside[e.target]
        ]
        fed = {edge.target for edge in edges}
        first = next((b for b in islands if any(_overlap(b, node) for node in again.values())), None)
        rings = [node for node in exchanges if node.kind is TaskKind.RING_SHIFT]
        for node in (*again.values(), *rings):
            edges += [GraphEdge(node.uid, island.uid) for island in islands if _overlap(island, node)]
            if first is None or node.uid in fed:
                continue
            # R may run as soon as its B could: it waits for what B waits for, so that memory stays low.
            edges += [
                GraphEdge(edge.source, node.uid, EdgeKind.TEMPORAL)
                for edge in graph.incoming.get(first.uid, ())
                if graph.node[edge.source].stage == node.stage
            ]
        return [*again.values(), *exchanges], edges

    def _exchanges_between(self, inside: Container[str], stage: int) -> list[Node]:
        """Return the exchanges of the forward on a way between two segments of the unit, or beside one."""
        return [
            node
            for node in self._exchanges.get(stage, ())
            if (node.kind is TaskKind.RING_SHIFT and f"F.{node.region[0]}" in inside)
            or (
                self._reaches(node.uid, inside, backwards=True)
                and self._reaches(node.uid, inside, backwards=False)
            )
        ]

    @cached_property
    def _exchanges(self) -> dict[int, list[Node]]:
        """Return the exchanges of the forward by stage."""
        found: dict[int, list[Node]] = {}
        for node in self.before.nodes:
            if node.is_exchange and node.phase is F:
                found.setdefault(node.stage, []).append(node)
        return found

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


def _overlap(island: Node, other: Node) -> bool:
    """Return whether an island has segments of an R, or of an exchange beside one."""
    first, last = (other.first_segment, other.last_segment) if not other.is_exchange else other.region
    return island.first_segment <= last and first <= island.last_segment


def _numbered(starts: Container[int], *, count: int) -> list[int]:
    """Return, for each of `count` segments, how many of `starts` lie before it or at it."""
    return list(accumulate(i in starts for i in range(count)))


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

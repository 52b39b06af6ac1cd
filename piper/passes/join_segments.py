"""Join the segments of a stage into tasks: one F, one B, and R before the B of each recomputed unit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

from piper.graph.cut import units_of
from piper.graph.graph import EdgeKind, Graph, GraphEdge, Node
from simulator.plan import TaskKind


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSegments:
    """Join what nothing separates, so that a stage costs one launch per pass.

    [Note: islands]
    An island is a run of segments whose gradients are computed by one B: a unit that is recomputed, or a
    run of units that are not. F covers the whole stage; autograd is cut at island borders.

    rewrite: F.0 -> F.1 -> B.1 -> B.0                     ->  F.0-1 -> B.0-1
             F.0 -> F.1 -> B.1 -> B.0, both recomputed    ->  F.0-1 -> R.1 -> B.1 -> R.0 -> B.0
    """

    def apply(self, graph: Graph) -> Graph:
        """Return the graph with joined nodes."""
        home: dict[str, str] = {}
        joined: list[Node] = []
        for stage in range(graph.num_stages):
            for run in (
                [n for n in graph.nodes if n.kind is TaskKind.F and n.stage == stage],
                *_islands(graph, stage),
            ):
                node = _join(run)
                joined.append(node)
                home |= {part.uid: node.uid for part in run}
        edges = [
            replace(edge, source=home[edge.source], target=home[edge.target])
            for edge in graph.edges
            if home[edge.source] != home[edge.target]
        ]
        bare = replace(graph, nodes=(), edges=())
        return _insert_recompute(bare.rewrite(add=joined, connect=edges))


def _islands(graph: Graph, stage: int) -> list[list[Node]]:
    backward = [n for n in graph.nodes if n.kind is TaskKind.B and n.stage == stage]
    unit = units_of(graph.model).of_segment
    keys = {n.uid: (n.recomputed, unit[n.first_segment] if n.recomputed else -1) for n in backward}
    runs = [list(run) for _, run in groupby(backward, key=lambda n: keys[n.uid])]
    return runs[::-1]


def _join(run: list[Node]) -> Node:
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


def _insert_recompute(graph: Graph) -> Graph:
    added, edges = [], []
    for node in graph.nodes:
        if node.kind is not TaskKind.B or not node.recomputed:
            continue
        again = replace(node, uid=node.uid.replace("B.", "R."), kind=TaskKind.R)
        added.append(again)
        edges.append(GraphEdge(again.uid, node.uid))
        # R may run as soon as its B could: it waits for what B waits for, so that memory stays low.
        edges += [
            GraphEdge(edge.source, again.uid, EdgeKind.TEMPORAL)
            for edge in graph.incoming.get(node.uid, ())
            if graph.node[edge.source].stage == node.stage
        ]
    return graph.rewrite(add=added, connect=edges)

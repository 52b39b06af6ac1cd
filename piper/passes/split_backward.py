"""Split backwards into BI and BW where the order asks for halves."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from piper.graph.buckets import BucketPlanner
from piper.graph.graph import Graph, GraphEdge, Node
from simulator.plan import TaskKind


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBackward:
    """Put BI and BW beside the B of every stage of which some microbatch is split by its row.

    BI is wired as B is; BW follows it and gives the gradients of parameters. B stays: the row says which of
    them a microbatch uses. One BW serves all islands of a stage, or those of each bucket where B ends with
    buckets, and of each part where rows divide BW.

    rewrite: F -> B -> B of the previous stage
          -> F -> {B, BI} -> {B, BI} of the previous stage;  BI -> BW
    """

    def apply(self, graph: Graph) -> Graph:
        """Return the graph with halves beside B."""
        split = {
            task.stage for row in graph.rows for slot in row for task in slot if task.kind is TaskKind.BI
        }
        if not split:
            return graph
        whole = [n for n in graph.nodes if n.kind is TaskKind.B and n.stage in split]
        halves = {n.uid: replace(n, uid=n.uid.replace("B.", "BI."), kind=TaskKind.BI) for n in whole}
        edges = [new for edge in graph.edges for new in _beside(graph, edge, halves)]
        weights: list[Node] = []
        gathered = [n for n in graph.nodes if n.is_exchange and n.phase is TaskKind.R]
        chunks = BucketPlanner(graph=graph).divided[TaskKind.B]
        borders = {i for kind, i in graph.row_borders if kind is TaskKind.BW}
        for run in _runs(whole, chunks, borders=borders):
            weights.append(_weights(run))
            edges += [GraphEdge(halves[part.uid].uid, weights[-1].uid) for part in run]
            edges += [GraphEdge(n.uid, weights[-1].uid) for n in gathered if _reads(weights[-1], n)]
        return graph.rewrite(add=[*halves.values(), *weights], connect=edges)


def _beside(graph: Graph, edge: GraphEdge, halves: Mapping[str, Node]) -> Iterator[GraphEdge]:
    """Yield what an edge at a B means for its BI: within a stage, both ends are split or none is."""
    sources = [edge.source, *([halves[edge.source].uid] if edge.source in halves else [])]
    targets = [edge.target, *([halves[edge.target].uid] if edge.target in halves else [])]
    both = len(sources) == len(targets) > 1
    if both and graph.node[edge.source].stage == graph.node[edge.target].stage:
        yield replace(edge, source=sources[1], target=targets[1])
        return
    for source in sources:
        for target in targets:
            if (source, target) != (edge.source, edge.target):
                yield replace(edge, source=source, target=target)


def _runs(nodes: Sequence[Node], chunks: Sequence[int], *, borders: Container[int]) -> list[list[Node]]:
    """Return the B nodes that one BW stands for: neighbours of a stage with one bucket, between borders."""
    found: list[list[Node]] = []
    for node in sorted(nodes, key=lambda n: -n.first_segment):
        last = found[-1][-1] if found else None
        if (
            last is not None
            and (last.stage, last.first_segment) == (node.stage, node.last_segment + 1)
            and chunks[last.first_segment] == chunks[node.first_segment]
            and last.first_segment not in borders
        ):
            found[-1].append(node)
        else:
            found.append([node])
    return found


def _reads(weights: Node, exchange: Node) -> bool:
    """Return whether an exchange brings back, for a region, what a BW reads."""
    return weights.first_segment <= exchange.region[1] and exchange.region[0] <= weights.last_segment


def _weights(run: Sequence[Node]) -> Node:
    first, last = run[-1], run[0]
    shared = set(first.tags).intersection(*(n.tags for n in run))
    return replace(
        first,
        uid=f"BW.{first.first_segment}-{last.last_segment}",
        kind=TaskKind.BW,
        tags=tuple(sorted(shared)),
        last_segment=last.last_segment,
    )

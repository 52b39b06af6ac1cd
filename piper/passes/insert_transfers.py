"""Send what crosses from one pipeline rank to another: activations down, their gradients up."""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper.graph.graph import Graph, GraphEdge, Node
from simulator.plan import Edge, TaskKind


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertTransfers:
    """Replace every edge between pipeline ranks by a transfer.

    [Note: one transfer per pair of stages]
    All tensors from stage s to stage t travel together; a tensor that skips stages goes straight to its
    consumer. There is no edge between the send and its receive: they are matched by (edge, microbatch).

    rewrite: F(s) -> F(t)  ->  F(s) -> SEND_F   RECV_F -> F(t)
             B(t) -> B(s)  ->  B(t) -> SEND_B   RECV_B -> B(s)
    """

    def apply(self, graph: Graph) -> Graph:
        """Return the graph with transfers in place of crossing edges."""
        homes = graph.pipeline_rank_of_stage
        crossings = tuple(e for e in _stage_edges(graph) if homes[e.source_stage] != homes[e.target_stage])
        graph = replace(graph, crossings=crossings)
        for number, crossing in enumerate(crossings):
            graph = _cross(graph, number, TaskKind.F)
            if crossing.grad_values:
                graph = _cross(graph, number, TaskKind.B)
        return graph


def _stage_edges(graph: Graph) -> list[Edge]:
    segments, stage_of = graph.model.segments, graph.stage_of_segment
    values: dict[tuple[int, int], dict[tuple[int, int], None]] = {}
    for i, segment in enumerate(segments):
        for source, output in segment.inputs:
            if source >= 0 and stage_of[source] != stage_of[i]:
                values.setdefault((stage_of[source], stage_of[i]), {})[source, output] = None
    return [
        Edge(
            source_stage=source_stage,
            target_stage=target_stage,
            values=tuple(crossing),
            grad_values=tuple(v for v in crossing if segments[v[0]].outputs[v[1]].requires_grad),
        )
        for (source_stage, target_stage), crossing in sorted(values.items())
    ]


def _cross(graph: Graph, number: int, kind: TaskKind) -> Graph:
    """Insert one direction of a crossing: activations from source to target stage, gradients back."""
    ends = (graph.crossings[number].source_stage, graph.crossings[number].target_stage)
    source_stage, target_stage = ends if kind is TaskKind.F else ends[::-1]
    source, target = (graph.pipeline_rank_of_stage[stage] for stage in (source_stage, target_stage))
    crossing = [
        edge
        for edge in graph.edges
        if _is(graph.node[edge.source], kind, source_stage)
        and _is(graph.node[edge.target], kind, target_stage)
    ]
    letter = kind.name
    send = Node(
        uid=f"SEND_{letter}.e{number}",
        kind=TaskKind[f"SEND_{letter}"],
        stage=source_stage,
        pipeline_rank=source,
        stream=f"send_{letter.lower()}>{target}",
        edge=number,
        peer=target,
    )
    receive = replace(
        send,
        uid=f"RECV_{letter}.e{number}",
        kind=TaskKind[f"RECV_{letter}"],
        stage=target_stage,
        pipeline_rank=target,
        stream=f"recv_{letter.lower()}<{source}",
        peer=source,
    )
    edges = [GraphEdge(edge.source, send.uid) for edge in crossing]
    edges += [GraphEdge(receive.uid, edge.target) for edge in crossing]
    kept = tuple(edge for edge in graph.edges if edge not in set(crossing))
    return replace(graph, edges=kept).rewrite(add=[send, receive], connect=edges)


def _is(node: Node, kind: TaskKind, stage: int) -> bool:
    return node.kind is kind and node.stage == stage

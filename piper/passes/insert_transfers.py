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
        between = _between_stages(graph)
        nodes: list[Node] = []
        edges: list[GraphEdge] = []
        gone: set[GraphEdge] = set()
        for number, crossing in enumerate(crossings):
            ends = (crossing.source_stage, crossing.target_stage)
            ways = [(TaskKind.F, *ends), (TaskKind.B, *ends[::-1])]
            for way in ways if crossing.grad_values else ways[:1]:
                send, receive = _transfer(graph, number, way)
                crossed = between.get(way, [])
                nodes += [send, receive]
                edges += [GraphEdge(edge.source, send.uid) for edge in crossed]
                edges += [GraphEdge(receive.uid, edge.target) for edge in crossed]
                gone.update(crossed)
        kept = tuple(edge for edge in graph.edges if edge not in gone)
        return replace(graph, crossings=crossings, edges=kept).rewrite(add=nodes, connect=edges)


_Way = tuple[TaskKind, int, int]
"""Pass (F, B), stage that sends, stage that receives."""


def _between_stages(graph: Graph) -> dict[_Way, list[GraphEdge]]:
    """Return the edges from one stage to another within a pass."""
    found: dict[_Way, list[GraphEdge]] = {}
    for edge in graph.edges:
        source, target = graph.node[edge.source], graph.node[edge.target]
        if source.stage != target.stage and source.pass_kind is target.pass_kind:
            found.setdefault((source.pass_kind, source.stage, target.stage), []).append(edge)
    return found


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


def _transfer(graph: Graph, number: int, way: _Way) -> tuple[Node, Node]:
    """Return the send and the receive of one direction of a crossing."""
    kind, source_stage, target_stage = way
    source, target = (graph.pipeline_rank_of_stage[stage] for stage in (source_stage, target_stage))
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
    return send, receive

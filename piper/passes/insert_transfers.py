"""Send what crosses from one pipeline rank to another: activations down, their gradients up."""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper.graph.graph import Graph, GraphEdge, Node, copied_uid
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
        ways = _ways(graph)
        crossing = {frozenset((way.source.stage, way.target.stage)) for way in ways if way.crosses}
        crossings = tuple(e for e in _stage_edges(graph) if {e.source_stage, e.target_stage} in crossing)
        number = {frozenset((e.source_stage, e.target_stage)): i for i, e in enumerate(crossings)}
        nodes: list[Node] = []
        edges: list[GraphEdge] = []
        gone: set[GraphEdge] = set()
        ordered = sorted((way for way in ways if way.crosses), key=lambda way: way.place(number))
        for way in ordered:
            send, receive = way.transfer(way.place(number)[0])
            nodes += [send, receive]
            edges += [GraphEdge(edge.source, send.uid) for edge in ways[way]]
            edges += [GraphEdge(receive.uid, edge.target) for edge in ways[way]]
            gone.update(ways[way])
        kept = tuple(edge for edge in graph.edges if edge not in gone)
        return replace(graph, crossings=crossings, edges=kept).rewrite(add=nodes, connect=edges)


@dataclass(frozen=True, slots=True)
class _End:
    """A stage at one of its homes; `copied`: at its second one."""

    stage: int
    pipeline_rank: int
    copied: bool


@dataclass(frozen=True, slots=True)
class _Way:
    """From one stage to another within a pass (F, B)."""

    kind: TaskKind
    source: _End
    target: _End

    @property
    def crosses(self) -> bool:
        """Return whether it leads to another pipeline rank."""
        return self.source.pipeline_rank != self.target.pipeline_rank

    def place(self, number: dict[frozenset[int], int]) -> tuple[int, bool, bool]:
        """Return the crossing's number, and what else orders the ways over one crossing."""
        stages = frozenset((self.source.stage, self.target.stage))
        return number[stages], self.source.copied, self.kind is TaskKind.B

    def transfer(self, number: int) -> tuple[Node, Node]:
        """Return the send and the receive."""
        letter, source, target = self.kind.name, self.source, self.target
        send = Node(
            uid=f"SEND_{letter}.e{number}",
            kind=TaskKind[f"SEND_{letter}"],
            stage=source.stage,
            pipeline_rank=source.pipeline_rank,
            stream=f"send_{letter.lower()}>{target.pipeline_rank}",
            edge=number,
            peer=target.pipeline_rank,
        )
        receive = replace(
            send,
            uid=f"RECV_{letter}.e{number}",
            kind=TaskKind[f"RECV_{letter}"],
            stage=target.stage,
            pipeline_rank=target.pipeline_rank,
            stream=f"recv_{letter.lower()}<{source.pipeline_rank}",
            peer=source.pipeline_rank,
        )
        if source.copied:
            send, receive = (replace(node, uid=copied_uid(node.uid)) for node in (send, receive))
        return send, receive


def _ways(graph: Graph) -> dict[_Way, list[GraphEdge]]:
    """Return the edges from one stage to another within a pass."""
    homes = graph.pipeline_rank_of_stage

    def end(node: Node) -> _End:
        return _End(node.stage, node.pipeline_rank, homes[node.stage] != node.pipeline_rank)

    found: dict[_Way, list[GraphEdge]] = {}
    for edge in graph.edges:
        source, target = graph.node[edge.source], graph.node[edge.target]
        if source.stage != target.stage and source.pass_kind is target.pass_kind:
            found.setdefault(_Way(source.pass_kind, end(source), end(target)), []).append(edge)
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

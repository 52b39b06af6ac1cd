"""Text form of a graph, for people and golden tests."""

from __future__ import annotations

from piper.graph.graph import EdgeKind, Graph, Node
from simulator.plan import NONE

_ARROWS = {EdgeKind.DATA: "->", EdgeKind.TEMPORAL: "~>", EdgeKind.PREVIOUS_STEP: "=>"}


def dump(graph: Graph) -> str:
    """Return one line per node, with what follows it (-> data, ~> temporal, => of the next step)."""
    lines = [f"stages: {graph.num_stages}, microbatches: {len(graph.micro_batch_sizes) or '-'}"]
    for node in graph.nodes:
        after = [f"{_ARROWS[edge.kind]} {edge.target}" for edge in graph.outgoing.get(node.uid, ())]
        lines.append(f"{node.uid:<18} {_place(node):<34} {'  '.join(after)}".rstrip())
    return "\n".join(lines) + "\n"


def _place(node: Node) -> str:
    rank = "-" if node.pipeline_rank == NONE else str(node.pipeline_rank)
    stage = "-" if node.stage == NONE else str(node.stage)
    often = "" if node.per_microbatch else " once"
    return f"stage {stage} rank {rank} {node.stream}{often}{' recomputed' if node.recomputed else ''}"

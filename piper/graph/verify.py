"""Verification of a graph between any two rewrites: our own invariants, not user input."""

from __future__ import annotations

from cost_models.errors import check_invariant
from piper.graph.graph import EdgeKind, Graph


def verify(graph: Graph, *, after: str) -> None:
    """Raise InternalError unless uids are unique, edges lead to nodes, and no cycle is closed."""
    check_invariant(len(graph.node) == len(graph.nodes), f"two nodes share a uid after {after}")
    for edge in graph.edges:
        known = edge.source in graph.node and edge.target in graph.node
        check_invariant(known, f"edge {edge.source} -> {edge.target} leads nowhere after {after}")
        if edge.kind is not EdgeKind.PREVIOUS_STEP:
            backwards = not graph.node[edge.source].per_microbatch and graph.node[edge.target].per_microbatch
            check_invariant(not backwards, f"{edge.target} waits for the step's end after {after}")
    topological_order(graph, after=after)


def topological_order(graph: Graph, *, after: str = "compilation") -> tuple[str, ...]:
    """Return uids so that every edge of the step leads forward; ties in node order."""
    waiting = {n.uid: 0 for n in graph.nodes}
    for edge in graph.edges:
        if edge.kind is not EdgeKind.PREVIOUS_STEP:
            waiting[edge.target] += 1
    ready = [uid for uid, count in waiting.items() if count == 0]
    order: list[str] = []
    for uid in ready:
        order.append(uid)
        for edge in graph.outgoing.get(uid, ()):
            if edge.kind is not EdgeKind.PREVIOUS_STEP:
                waiting[edge.target] -= 1
                if waiting[edge.target] == 0:
                    ready.append(edge.target)
    stuck = [uid for uid, count in waiting.items() if count > 0]
    check_invariant(not stuck, f"cycle through {', '.join(stuck[:6])} after {after}")
    return tuple(order)

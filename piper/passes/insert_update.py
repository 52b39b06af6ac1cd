"""End the step: gradient norm over the world, update per bucket, parameters back to all replicas."""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper.graph.graph import EdgeKind, Graph, GraphEdge, Node
from piper.passes.reduce_gradients import STREAM, overlaps, tied_uid, users
from simulator.plan import Bucket, TaskKind


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertUpdate:
    """Insert NORM, UPDATE and (ZeRO-1) ALL_GATHER, and let the next step wait for them.

    [Note: global-norm clipping]
    Clipping needs the norm over all parameters of the model: a sum of squares on every rank, then an
    all-reduce over the world. It is a barrier between the last reduction and the first update.

    rewrite: reduction            ->  reduction -> NORM -> ALL_REDUCE@norm -> UPDATE => F of the next step
             reduction (ZeRO-1)   ->  ... -> UPDATE -> ALL_GATHER => F of the next step
    """

    def apply(self, graph: Graph) -> Graph:
        """Return the graph with the end of the step."""
        for rank in range(graph.num_pipeline_ranks):
            graph = _finish_rank(graph, rank)
        return graph


def _finish_rank(graph: Graph, rank: int) -> Graph:
    buckets = [b for b in graph.buckets[rank] if b.kind == "dense"]
    nodes: list[Node] = []
    edges: list[GraphEdge] = []
    gates = {bucket.name: _last_of(graph, rank, bucket) for bucket in buckets}
    if graph.clip_grad_norm is not None:
        norm = Node(uid=f"NORM.r{rank}", kind=TaskKind.NORM, pipeline_rank=rank, per_microbatch=False)
        total = Node(
            uid=f"ALL_REDUCE.norm.r{rank}", kind=TaskKind.ALL_REDUCE, pipeline_rank=rank, stream=STREAM,
            per_microbatch=False, group="world",
        )  # fmt: skip
        nodes += [norm, total]
        edges += [GraphEdge(uid, norm.uid) for uid in dict.fromkeys(u for g in gates.values() for u in g)]
        edges.append(GraphEdge(norm.uid, total.uid))
        gates = {name: [total.uid] for name in gates}
    for bucket in buckets:
        update = Node(
            uid=f"UPDATE.{bucket.name}", kind=TaskKind.UPDATE, stage=bucket.stage, pipeline_rank=rank,
            per_microbatch=False, bucket=bucket.name,
        )  # fmt: skip
        nodes.append(update)
        edges += [GraphEdge(uid, update.uid) for uid in gates[bucket.name]]
        last = update
        if bucket.shard_count > 1:
            last = replace(
                update,
                uid=f"ALL_GATHER.{bucket.name}",
                kind=TaskKind.ALL_GATHER,
                stream=STREAM,
                group=f"dp{rank}",
            )
            nodes.append(last)
            edges.append(GraphEdge(update.uid, last.uid))
        edges += [
            GraphEdge(last.uid, n.uid, EdgeKind.PREVIOUS_STEP)
            for n in users(graph, rank, bucket, kind=TaskKind.F)
        ]
    return graph.rewrite(add=nodes, connect=edges)


def _last_of(graph: Graph, rank: int, bucket: Bucket) -> list[str]:
    reductions = [n.uid for n in graph.nodes if n.bucket == bucket.name and n.pipeline_rank == rank]
    if reductions:
        return reductions
    tied = [tied_uid(b, rank) for b in graph.buckets[rank] if b.kind == "tied" and overlaps(b, bucket)]
    return [n.uid for n in users(graph, rank, bucket, kind=TaskKind.B)] + tied

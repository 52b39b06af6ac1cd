"""End the step: gradient norm over the world, update per bucket, parameters back to all replicas."""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper.graph.buckets import CUT_PARAMETERS, rule_of
from piper.graph.graph import EdgeKind, Graph, GraphEdge, Node, copied_uid
from piper.graph.rank_groups import name_on_stream, world_group
from piper.passes.reduce_gradients import BACKWARD_WEIGHTS, STREAM, Users, overlaps, tied_uid
from simulator.plan import Bucket, TaskKind


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertUpdate:
    """Insert NORM, UPDATE and (ZeRO-1, 2) ALL_GATHER, and let the next step wait for them.

    [Note: global-norm clipping]
    Clipping needs the norm over all parameters of the model: a sum of squares on every rank, then an
    all-reduce over the world. It is a barrier between the last reduction and the first update.

    rewrite: reduction               ->  reduction -> NORM -> ALL_REDUCE@norm -> UPDATE => F of the next step
             reduction (ZeRO-1, 2)   ->  ... -> UPDATE -> ALL_GATHER => F of the next step
             reduction (ZeRO-3)      ->  ... -> UPDATE => ALL_GATHER before F of the next step
    """

    def apply(self, graph: Graph) -> Graph:
        """Return the graph with the end of the step."""
        if graph.clip_grad_norm is not None:
            graph = replace(graph, groups=(*graph.groups, world_group(graph)))
        users, reductions = Users(graph=graph), _reductions(graph)
        nodes: list[Node] = []
        edges: list[GraphEdge] = []
        for rank in range(graph.num_pipeline_ranks):
            _End(graph=graph, rank=rank, users=users, reductions=reductions).add(nodes, edges)
        return graph.rewrite(add=nodes, connect=edges)


def _reductions(graph: Graph) -> dict[tuple[int, str], list[str]]:
    """Return the last reductions of every bucket by pipeline rank."""
    found: dict[tuple[int, str], list[str]] = {}
    for node in graph.nodes:
        if node.bucket and node.kind in {TaskKind.ALL_REDUCE, TaskKind.REDUCE_SCATTER}:
            found[node.pipeline_rank, node.bucket] = [node.uid]  # a later level replaces an earlier one
    return found


@dataclass(frozen=True, kw_only=True)
class _End:
    """The end of the step of one pipeline rank.

    Args:
        graph: with buckets and reductions.
        rank: the pipeline rank.
        users: of parameters.
        reductions: the last ones of every bucket.
    """

    graph: Graph
    rank: int
    users: Users
    reductions: dict[tuple[int, str], list[str]]

    def add(self, nodes: list[Node], edges: list[GraphEdge]) -> None:
        """Add nodes and edges to what is inserted."""
        buckets = [b for b in self.graph.buckets[self.rank] if b.kind != "tied"]
        gates = {
            bucket.name: self.reductions.get((self.rank, bucket.name)) or self._unreduced(bucket)
            for bucket in buckets
        }
        if self.graph.clip_grad_norm is not None:
            gates = self._clipped(gates, nodes, edges)
        for bucket in buckets:
            update = Node(
                uid=self._uid(TaskKind.UPDATE, bucket), kind=TaskKind.UPDATE, stage=bucket.stage,
                pipeline_rank=self.rank, per_microbatch=False, bucket=bucket.name,
            )  # fmt: skip
            nodes.append(update)
            edges += [GraphEdge(uid, update.uid) for uid in gates[bucket.name]]
            last = update
            if bucket.shard_count > 1 and bucket.zero < CUT_PARAMETERS:
                last = self._gather(update, bucket)
                nodes.append(last)
                edges.append(GraphEdge(update.uid, last.uid))
            first = self._first_of_step(bucket)
            edges += [GraphEdge(last.uid, uid, EdgeKind.PREVIOUS_STEP) for uid in first]

    def _clipped(
        self, gates: dict[str, list[str]], nodes: list[Node], edges: list[GraphEdge]
    ) -> dict[str, list[str]]:
        """Add the norm; returns what updates wait for then."""
        norm = Node(
            uid=f"NORM.r{self.rank}", kind=TaskKind.NORM, pipeline_rank=self.rank, per_microbatch=False
        )
        total = Node(
            uid=f"ALL_REDUCE.norm.r{self.rank}", kind=TaskKind.ALL_REDUCE, pipeline_rank=self.rank,
            stream=STREAM, per_microbatch=False, group="world",
        )  # fmt: skip
        nodes += [norm, total]
        edges += [GraphEdge(uid, norm.uid) for uid in dict.fromkeys(u for g in gates.values() for u in g)]
        edges.append(GraphEdge(norm.uid, total.uid))
        return {name: [total.uid] for name in gates}

    def _unreduced(self, bucket: Bucket) -> list[str]:
        """Return what the update of a bucket with one replica waits for."""
        tied = [b for b in self.graph.buckets[self.rank] if b.kind == "tied" and overlaps(b, bucket)]
        makers = self.users.of(self.rank, bucket, kinds=BACKWARD_WEIGHTS)
        return makers + [tied_uid(b, self.rank) for b in tied]

    def _gather(self, update: Node, bucket: Bucket) -> Node:
        rule = rule_of(self.graph, bucket)
        scatter = self.graph.node[f"{TaskKind.REDUCE_SCATTER.name}.{bucket.name}.r{self.rank}"]
        return replace(
            update,
            uid=self._uid(TaskKind.ALL_GATHER, bucket),
            kind=TaskKind.ALL_GATHER,
            stream=rule.gather_stream,
            group=name_on_stream(scatter.group, rule.gather_stream, usual=STREAM),
        )

    def _uid(self, kind: TaskKind, bucket: Bucket) -> str:
        uid = f"{kind.name}.{bucket.name}"
        return uid if self.graph.pipeline_rank_of_stage[bucket.stage] == self.rank else copied_uid(uid)

    def _first_of_step(self, bucket: Bucket) -> list[str]:
        """Return what uses a bucket's parameters first: F, or the gathers of parameters that are cut."""
        gather = f"ALL_GATHER.{TaskKind.F.name}.{bucket.name}.r{self.rank}"
        if gather in self.graph.node:
            return [gather]
        return self.users.of(self.rank, bucket, kinds=(TaskKind.F,))

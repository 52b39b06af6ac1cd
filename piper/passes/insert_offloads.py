"""Leave state and activations to the host while they are not needed, and bring them back in time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from piper.errors import StrategyError
from piper.graph.buckets import CUT_PARAMETERS, offloading_of
from piper.graph.facts import Offloading
from piper.graph.graph import Graph, GraphEdge, Node
from piper.passes.reduce_gradients import Users
from simulator.plan import Bucket, TaskKind

F, B, UPDATE = TaskKind.F, TaskKind.B, TaskKind.UPDATE
_GRADIENT = (TaskKind.B, TaskKind.BI)


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertOffloads:
    """Insert copies to the host and back.

    [Note: offloading]
    * activations: what segments keep inside goes out behind F, and comes back before B (BI), island by
      island. Tensors at their borders stay.
    * optimizer: the state of a bucket comes in before its update and goes out behind it.
    * params: the parameters of a bucket come in before the tasks that use them, and are dropped behind them;
      the update gets them too, and writes them back.
    A copy back starts no earlier than `prefetch` compute tasks before the task that waits for it.

    rewrite: F -> B          ->  F -> OFFLOAD;  RELOAD -> B                               (activations)
             UPDATE          ->  RELOAD -> UPDATE -> OFFLOAD                              (optimizer)
             F, B, UPDATE    ->  RELOAD -> F;  RELOAD -> B;  RELOAD -> UPDATE -> OFFLOAD  (params)
    """

    def apply(self, graph: Graph) -> Graph:
        """Return the graph with copies; raises StrategyError for parameters that are cut and offloaded."""
        if not graph.offloadings:
            return graph
        nodes: list[Node] = []
        edges: list[GraphEdge] = []
        for node, before, after in (*_activations(graph), *_state(graph)):
            nodes.append(node)
            edges += [GraphEdge(uid, node.uid) for uid in before]
            edges += [GraphEdge(node.uid, uid) for uid in after]
        return graph.rewrite(add=nodes, connect=edges)


_Copy = tuple[Node, list[str], list[str]]
"""A copy, what it follows, what waits for it."""


def _activations(graph: Graph) -> Iterator[_Copy]:
    """Yield the copies of what islands keep."""
    facts = {i: fact for fact in graph.offloadings if fact.what == "activations" for i in fact.segments}
    forward = [n for n in graph.nodes if n.kind is F]
    halves = {(n.pipeline_rank, n.first_segment): n.uid for n in graph.nodes if n.kind is TaskKind.BI}
    for island in (n for n in graph.nodes if n.kind is B):
        claimed = [i for i in range(island.first_segment, island.last_segment + 1) if i in facts]
        if not claimed:
            continue
        copy = replace(
            island, kind=TaskKind.OFFLOAD, uid=f"OFFLOAD.{island.uid}", stream=facts[claimed[0]].stream,
            first_segment=-1, last_segment=-1, recomputed=False, phase=F, region=(claimed[0], claimed[-1]),
            prefetch=facts[claimed[0]].prefetch,
        )  # fmt: skip
        home = [n for n in forward if n.pipeline_rank == island.pipeline_rank]
        makers = [n.uid for n in home if any(n.first_segment <= i <= n.last_segment for i in claimed)]
        yield copy, makers, []
        takers = [island.uid]
        if (island.pipeline_rank, island.first_segment) in halves:
            takers.append(halves[island.pipeline_rank, island.first_segment])
        back = replace(copy, kind=TaskKind.RELOAD, uid=f"RELOAD.{island.uid}", phase=B)
        yield back, [copy.uid], takers


def _state(graph: Graph) -> Iterator[_Copy]:
    """Yield the copies of buckets: optimizer state and parameters."""
    users = Users(graph=graph)
    ends = {(n.pipeline_rank, n.bucket): n for n in graph.nodes if n.kind is UPDATE}
    gathers = {
        (n.pipeline_rank, n.bucket): n.uid
        for n in graph.nodes
        if n.kind is TaskKind.ALL_GATHER and not n.per_microbatch
    }
    for rank, held in enumerate(graph.buckets):
        for bucket in (b for b in held if b.kind != "tied"):
            update = ends[rank, bucket.name]
            optimizer = offloading_of(graph, bucket, "optimizer")
            if optimizer is not None:
                yield from _around(update, optimizer, last=update.uid)
            params = offloading_of(graph, bucket, "params")
            if params is None:
                continue
            _check(bucket, params)
            yield from _around(update, params, last=gathers.get((rank, bucket.name), update.uid))
            for phase, kinds in ((F, (F,)), (B, (*_GRADIENT, TaskKind.R))):
                copy = _copy(update, params, kind=TaskKind.RELOAD)
                uid = copy.uid.replace(".params.", f".params.{phase.name}.")
                yield (
                    replace(copy, uid=uid, per_microbatch=True, phase=phase),
                    [],
                    users.of(rank, bucket, kinds=kinds),
                )


def _around(update: Node, fact: Offloading, *, last: str) -> Iterator[_Copy]:
    """Yield the copies before the update of a bucket, and behind the last task of the step that needs it."""
    yield _copy(update, fact, kind=TaskKind.RELOAD), [], [update.uid]
    yield _copy(update, fact, kind=TaskKind.OFFLOAD), [last], []


def _copy(update: Node, fact: Offloading, *, kind: TaskKind) -> Node:
    uid = update.uid.replace(UPDATE.name, f"{kind.name}.{fact.what}")
    return replace(update, uid=uid, kind=kind, stream=fact.stream, prefetch=fact.prefetch, moves=fact.what)


def _check(bucket: Bucket, fact: Offloading) -> None:
    if bucket.zero >= CUT_PARAMETERS:
        raise StrategyError(
            where=fact.where, field="offload.what", value="params",
            rule=f"are cut over {bucket.shard_count} ranks (shard_params) and gathered before each use",
            fix="offload the optimizer state, or do not set shard_params",
        )  # fmt: skip

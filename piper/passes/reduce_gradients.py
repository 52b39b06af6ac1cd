"""Form the buckets; sum gradients over stages that share a parameter, then over the replicas of a bucket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from piper.graph.buckets import CUT_PARAMETERS, BucketPlanner, Reduction
from piper.graph.graph import Graph, GraphEdge, Node
from piper.graph.rank_groups import tied_group
from piper.graph.shares import Shares
from simulator.plan import NONE, Bucket, Group, TaskKind

STREAM = "dp"
"""Of sums over pipeline ranks, and of the gradient norm."""
BACKWARD_WEIGHTS = (TaskKind.B, TaskKind.BW)
"""What makes gradients of parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceGradients:
    """Form the buckets and insert their reductions, and the gathers of parameters that are cut.

    Reductions run once per step, after the last backward; or after every backward, where gradients are cut
    (ZeRO-2, 3) or the strategy says so. With copies of shards (HSDP) shards are reduced first, then summed
    over the copies: once per step, or per microbatch where the strategy says so. See also
    `piper.graph.buckets`, [Note: buckets] and [Note: tied parameters].

    rewrite: B  ->  B -> [tied ALL_REDUCE] -> ALL_REDUCE                                    (nothing cut)
             B  ->  B -> [tied ALL_REDUCE] -> REDUCE_SCATTER -> [ALL_REDUCE over copies]    (state cut)
             F, B  ->  ALL_GATHER -> F;  ALL_GATHER -> B -> REDUCE_SCATTER                  (ZeRO-3)
    """

    def apply(self, graph: Graph) -> Graph:
        """Return the graph with buckets, reductions and gathers."""
        planner = BucketPlanner(graph=graph)
        plans = [planner.reductions(rank) for rank in range(graph.num_pipeline_ranks)]
        tied = _tied_sets(graph, planner)
        groups = _distinct(graph, plans, tied)
        number = {group.name: i for i, group in enumerate(groups)}
        graph = replace(
            graph,
            groups=groups,
            buckets=tuple(
                (
                    *(_numbered(plan, number) for plan in held),
                    *(_held_by(held, one, number) for one, group in tied if rank in group.pipeline_ranks),
                )
                for rank, held in enumerate(plans)
            ),
        )
        nodes: list[Node] = []
        edges: list[GraphEdge] = []
        users = Users(graph=graph)
        for rank, held in enumerate(plans):
            tied_here = [bucket for bucket in graph.buckets[rank] if bucket.kind == "tied"]
            for node, before, after in _collectives(rank, held, tied_here, users=users):
                nodes.append(node)
                edges += [GraphEdge(uid, node.uid) for uid in before]
                edges += [GraphEdge(node.uid, uid) for uid in after]
        return graph.rewrite(add=nodes, connect=edges)


def _distinct(
    graph: Graph, plans: Sequence[Sequence[Reduction]], tied: Iterable[tuple[Bucket, Group]]
) -> tuple[Group, ...]:
    found = {group.name: group for group in graph.groups}
    for held in plans:
        for plan in held:
            for group in (plan.everyone, plan.shards, plan.copies, plan.gathering):
                if group is not None:
                    found.setdefault(group.name, group)
    return (*found.values(), *(group for _, group in tied))


def _numbered(plan: Reduction, number: dict[str, int]) -> Bucket:
    group = NONE if plan.group is None else number[plan.group.name]
    return replace(plan.bucket, group=group)


def _tied_sets(graph: Graph, planner: BucketPlanner) -> list[tuple[Bucket, Group]]:
    shares = Shares(graph=graph)
    sets: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for name, ranks in planner.tied.items():
        sets.setdefault((ranks, shares.is_partial(name)), []).append(name)
    found: list[tuple[Bucket, Group]] = []
    for i, ((ranks, _), names) in enumerate(sorted(sets.items())):
        numel = shares.local_numel(names)
        bucket = Bucket(
            name=f"tied{i}", stage=NONE, kind="tied", parameters=tuple(names),
            numel=numel, padded_numel=numel, shard_count=1, group=0, zero=0,
        )  # fmt: skip
        found.append((bucket, tied_group(graph, bucket.name, ranks)))
    return found


def _held_by(held: Sequence[Reduction], tied: Bucket, number: dict[str, int]) -> Bucket:
    """Return a tied set as one device sees it: with the stage that stores the parameters there."""
    stage = next(plan.bucket.stage for plan in held if overlaps(tied, plan.bucket))
    return replace(tied, stage=stage, group=number[tied.name])


def _collectives(
    rank: int, plans: Sequence[Reduction], tied: Sequence[Bucket], *, users: Users
) -> Iterator[tuple[Node, list[str], list[str]]]:
    """Yield the collectives of a pipeline rank, each with what comes before it and after it."""
    for bucket in tied:
        node = _once(TaskKind.ALL_REDUCE, rank, bucket, group=bucket.name, stream=STREAM)
        yield node, users.of(rank, bucket, kinds=BACKWARD_WEIGHTS), []
    for plan in plans:
        makers = users.of(rank, plan.bucket, kinds=BACKWARD_WEIGHTS)
        makers += [tied_uid(part, rank) for part in tied if overlaps(part, plan.bucket)]
        for node in _levels(plan, rank):
            yield node, makers, []
            makers = [node.uid]
        if plan.bucket.zero >= CUT_PARAMETERS and plan.gathering is not None:
            for node, kinds in _gathers(rank, plan, plan.gathering).items():
                yield node, [], users.of(rank, plan.bucket, kinds=kinds)


def _levels(plan: Reduction, rank: int) -> list[Node]:
    """Return the reductions of a bucket in order."""
    found: list[Node] = []
    if plan.everyone is not None:
        found.append(_reduction(plan, rank, plan.everyone, kind=TaskKind.ALL_REDUCE))
    if plan.shards is not None:
        found.append(_reduction(plan, rank, plan.shards, kind=TaskKind.REDUCE_SCATTER))
    if plan.copies is not None:
        over = _reduction(plan, rank, plan.copies, kind=TaskKind.ALL_REDUCE)
        every = plan.rule.reduce_every == "microbatch"
        found.append(over if every else replace(over, per_microbatch=False, phase=None))
    return found


def _reduction(plan: Reduction, rank: int, group: Group, *, kind: TaskKind) -> Node:
    node = _once(kind, rank, plan.bucket, group=group.name, stream=plan.rule.reduce_stream)
    return replace(node, per_microbatch=True, phase=TaskKind.B) if plan.per_microbatch else node


def _gathers(rank: int, plan: Reduction, group: Group) -> dict[Node, tuple[TaskKind, ...]]:
    """Return the gathers of parameters, with what they serve: F and B apart, or both where they are kept."""
    backward = (TaskKind.R, TaskKind.B, TaskKind.BI)
    served = {TaskKind.F: (TaskKind.F,), TaskKind.B: backward}
    if not plan.rule.reshard:
        served = {TaskKind.F: (TaskKind.F, *backward)}
    name, stream = plan.bucket.name, plan.rule.gather_stream
    gather = _once(TaskKind.ALL_GATHER, rank, plan.bucket, group=group.name, stream=stream)
    uids = {phase: f"ALL_GATHER.{phase.name}.{name}.r{rank}" for phase in served}
    return {
        replace(gather, uid=uids[phase], per_microbatch=True, phase=phase): kinds
        for phase, kinds in served.items()
    }


@dataclass(frozen=True, kw_only=True)
class Users:
    """Which compute nodes use which parameter.

    Args:
        graph: placed and joined.
    """

    graph: Graph

    def of(self, rank: int, bucket: Bucket, *, kinds: Sequence[TaskKind]) -> list[str]:
        """Return the nodes of some kinds on a pipeline rank that use a parameter of the bucket, in order."""
        segments = {i for name in bucket.parameters for i in self._segments[name]}
        found = {
            position: node.uid
            for i in segments
            for position, node in self._nodes.get((rank, i), ())
            if node.kind in kinds
        }
        return [found[position] for position in sorted(found)]

    @cached_property
    def _segments(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for i, segment in enumerate(self.graph.model.segments):
            for name in segment.parameters:
                found.setdefault(name, []).append(i)
        return found

    @cached_property
    def _nodes(self) -> dict[tuple[int, int], list[tuple[int, Node]]]:
        """(pipeline rank, segment) -> compute nodes that cover it, with their positions in the graph."""
        found: dict[tuple[int, int], list[tuple[int, Node]]] = {}
        for position, node in enumerate(self.graph.nodes):
            if node.first_segment != NONE:
                for i in range(node.first_segment, node.last_segment + 1):
                    found.setdefault((node.pipeline_rank, i), []).append((position, node))
        return found


def overlaps(tied: Bucket, bucket: Bucket) -> bool:
    """Return whether a tied set has parameters of a bucket."""
    return not set(tied.parameters).isdisjoint(bucket.parameters)


def tied_uid(bucket: Bucket, rank: int) -> str:
    """Return the uid of a tied reduction on a pipeline rank."""
    return f"{TaskKind.ALL_REDUCE.name}.{bucket.name}.r{rank}"


def _once(kind: TaskKind, rank: int, bucket: Bucket, *, group: str, stream: str) -> Node:
    return Node(
        uid=f"{kind.name}.{bucket.name}.r{rank}",
        kind=kind,
        stage=bucket.stage,
        pipeline_rank=rank,
        stream=stream,
        per_microbatch=False,
        group=group,
        bucket=bucket.name,
    )

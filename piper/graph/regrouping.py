"""Borders between stages whose ranks are arranged in unlike ways: what is regrouped, what is refused.

[Note: regrouping]
Ranks count tp fastest, then cp, dp, and every stage has as many. So a replica of a stage with fewer
replicas (the coarse one) takes the samples of several neighbouring replicas of the other (the fine one), on
its ranks. Rank i of one stage sends to rank i of the other, always the share of a rank of the fine stage
(whole tokens from a coarse one: rank t along tp sends those of fine replica t / tp of the fine stage); what
ranks then lack, they exchange at the receiving side:
  sequence_parallel                 tokens are cut over tp at both ends: all-to-all within the coarse replica
  into a coarse stage               the tensors of k fine replicas: all-gather among the k ranks that got them
  into a fine stage                 the sender has all that the receiver needs and sends only that: nothing
  cp > 1, no sequence_parallel      positions along cp differ at the ends: all-to-all, as above
What has no microbatch dimension is whole at both ends. Gradients take the same way back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from piper.errors import StrategyError
from piper.graph.facts import StageMesh
from piper.graph.graph import Graph
from piper.graph.shares import Shares
from simulator.plan import TaskKind

_AXES = ("tp", "cp", "dp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouping:
    """What ranks of a stage do with tensors that came from a stage with another mesh.

    Args:
        kind: all-to-all or all-gather.
        pieces: of how many replicas of the other stage a rank needs tensors, when it got those of one.
        count, stride: how many ranks take part, and how far apart they are.
    """

    kind: TaskKind
    pieces: int
    count: int
    stride: int


def regrouping(shares: Shares, *, source: int, target: int) -> Regrouping | None:
    """Return what happens at stage `target` with tensors from stage `source`, or None: nothing."""
    graph = shares.graph
    theirs, ours = (graph.axis_size("dp", stage=stage) for stage in (source, target))
    if theirs == ours:
        return None
    coarse = target if ours < theirs else source
    pieces = max(1, theirs // ours)
    cp = graph.axis_size("cp", stage=target)
    if shares.sequence_parallel or cp > 1:
        count = cp * graph.axis_size("tp", stage=coarse)
        pieces = 1 if shares.sequence_parallel else pieces
        return Regrouping(kind=TaskKind.ALL_TO_ALL, pieces=pieces, count=count, stride=1)
    if pieces == 1:
        return None
    stride = graph.axis_size("tp", stage=source)
    return Regrouping(kind=TaskKind.ALL_GATHER, pieces=pieces, count=pieces, stride=stride)


def require_stage_meshes(shares: Shares) -> None:
    """Raise StrategyError where meshes of single stages do not go together with the rest of the strategy."""
    graph = shares.graph
    if graph.stage_meshes:
        _check_homes(graph)
        _check_experts(shares)
        _check_shared_parameters(graph)


def _check_homes(graph: Graph) -> None:
    """Raise where two stages of a pipeline rank, which is one set of ranks, are arranged differently."""
    for rank, stages in _held(graph):
        first, *others = stages
        for stage in others:
            if _sizes(graph, stage) != _sizes(graph, first):
                fact = graph.stage_mesh(stage) or graph.stage_mesh(first)
                raise StrategyError(
                    where=graph.mesh_line if fact is None else fact.where, field="mesh.filter",
                    value=f"stage {stage}",
                    rule=f"is arranged as {_text(graph, stage)}, but stage {first} on the same pipeline rank "
                    f"{rank} as {_text(graph, first)}",
                    fix=f'give all stages of a pipeline rank one mesh: "filter": {{"PP": {list(stages)}}}',
                )  # fmt: skip


def _held(graph: Graph) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield every pipeline rank with the stages that are placed on it, or that its row of the order has."""
    for rank in range(graph.num_pipeline_ranks):
        row = graph.rows[rank] if rank < len(graph.rows) else ()
        ordered = {task.stage for slot in row for task in slot}
        yield rank, tuple(sorted({*graph.stages_of_rank(rank), *ordered}))


def _check_experts(shares: Shares) -> None:
    for fact in shares.graph.stage_meshes:
        sizes = {axis: dict(fact.axes).get(axis, 1) for axis in ("ep", "etp")}
        if max(sizes.values()) > 1 and not set(fact.segments) & shares.expert_of.keys():
            axis = max(sizes, key=lambda name: sizes[name])
            raise StrategyError(
                where=fact.where, field=f"mesh.axes.{axis}", value=sizes[axis],
                rule="is an axis for experts, but no shard distributes any of these stages",
                fix=f'add {{"op": "shard", "filter": {{"EP": "*"}}}}, or leave {axis} out',
            )  # fmt: skip


def _check_shared_parameters(graph: Graph) -> None:
    """Raise for a parameter on two stages with unlike replicas: no sum rank by rank adds each sample once."""
    first: dict[str, int] = {}
    for segment, stage in zip(graph.model.segments, graph.stage_of_segment, strict=True):
        for name in segment.parameters:
            other = first.setdefault(name, stage)
            if _sizes(graph, other) != _sizes(graph, stage):
                fact = _own(graph, stage, other)
                raise StrategyError(
                    where=fact.where, field="mesh.axes", value=dict(fact.axes),
                    rule=f"differs between the stages {other} and {stage}, which share the parameter {name}: "
                    "its gradients are summed rank by rank, and their ranks have unlike samples",
                    fix=f"give the stages {other} and {stage} the same tp and dp",
                )  # fmt: skip


def _own(graph: Graph, *stages: int) -> StageMesh:
    return next(fact for stage in stages if (fact := graph.stage_mesh(stage)) is not None)


def _sizes(graph: Graph, stage: int) -> tuple[int, ...]:
    return tuple(graph.axis_size(axis, stage=stage) for axis in _AXES)


def _text(graph: Graph, stage: int) -> str:
    return " x ".join(f"{axis} {graph.axis_size(axis, stage=stage)}" for axis in _AXES)

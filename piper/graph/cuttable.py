"""Whether the regions of a model can be cut as the facts say; the directive that cannot is named."""

from __future__ import annotations

from collections.abc import Sequence

from cost_models.ops import OpKind
from piper.errors import StrategyError
from piper.graph.experts import count_experts
from piper.graph.facts import Fact
from piper.graph.graph import Graph
from piper.graph.shares import Shares

_HEADS = 1
"""Position of the query heads in the shape of attention."""


def require_cuttable(graph: Graph, shares: Shares) -> None:
    """Raise StrategyError where facts and model do not go together."""
    modes = {fact.sequence_parallel: fact for fact in graph.tensor_shardings}
    if len(modes) > 1:
        raise StrategyError(
            where=modes[False].where, field="shard_tensor.sequence_parallel", value=False,
            rule=f"differs from the shard_tensor at {modes[True].where}: tensors between regions are either "
            "cut over the tokens or not",
            fix="state the same for all regions",
        )  # fmt: skip
    for number, fact in shares.tensor_of.items():
        refused = graph.model.segments[number].tensor_refused
        if refused:
            raise StrategyError(
                where=fact.where, field="shard_tensor.filter", value=refused[0],
                rule="is multiplied with partial sums, or normalises over features that are cut: a region "
                "ends after one column-parallel and one row-parallel matmul, and norms single heads at most",
                fix="let an annotated TP region hold at most two matmuls in a row, or leave tp out",
            )  # fmt: skip
    _check_experts(graph, shares)
    _check_sequences(graph, shares)
    _check_heads(graph, shares)
    for number, sequence in shares.sequence_of.items():
        names = graph.model.segments[number].parameters
        if sequence.method == "all_to_all" and names:
            raise StrategyError(
                where=sequence.where, field="shard_sequence.method", value="all_to_all",
                rule=f"exchanges tokens for heads around attention, but the region has {names[0]}",
                fix='annotate attention alone, or use "method": "ring"',
            )  # fmt: skip


def require_used_axes(graph: Graph) -> None:
    """Raise for an axis over which nothing is cut: its ranks would repeat the same work."""
    cut: dict[str, tuple[str, Sequence[Fact]]] = {
        "tp": ("shard_tensor", graph.tensor_shardings),
        "cp": ("shard_sequence", graph.sequence_shardings),
    }
    whole = (graph.mesh_line, dict(graph.placed_mesh.axes), frozenset(range(len(graph.stage_of_segment))))
    single = [
        (fact.where, {"tp": dict(fact.axes)["tp"]}, frozenset(fact.segments)) for fact in graph.stage_meshes
    ]
    for where, sizes, segments in (whole, *single):
        for axis, (op, facts) in cut.items():
            if sizes.get(axis, 1) == 1 or any(not segments.isdisjoint(fact.segments) for fact in facts):
                continue
            raise StrategyError(
                where=where, field=f"mesh.axes.{axis}", value=sizes[axis],
                rule=f"is an axis over which no {op} cuts anything: its ranks would repeat the same work",
                fix=f'add {{"op": "{op}", "filter": {{"{axis.upper()}": "*"}}}}, or leave {axis} out',
            )  # fmt: skip


def _check_experts(graph: Graph, shares: Shares) -> None:
    counted = count_experts(graph.model, shares.expert_of.keys())
    for number, fact in shares.expert_of.items():
        if shares.degree("tp", number) > 1 and not shares.sequence_parallel:
            raise StrategyError(
                where=fact.where, field="shard.filter", value=f"segment {number}",
                rule="takes tokens from ranks of tp that all hold the same ones",
                fix="cut them: add shard_tensor with sequence_parallel for the dense regions",
            )  # fmt: skip
        experts = counted.get(number, 0)
        if experts % fact.degree:
            raise StrategyError(
                where=fact.where, field="shard.degree", value=fact.degree,
                rule=f"does not divide the {experts} experts of segment {number}",
                fix=f"use a divisor of {experts}",
            )  # fmt: skip


def _check_sequences(graph: Graph, shares: Shares) -> None:
    """Raise where attention would see a part of its sequence only."""
    for number, segment in enumerate(graph.model.segments):
        ranks = shares.context_degree[number]
        attends = any(operation.kind is OpKind.ATTENTION for operation in segment.forward.operations)
        if ranks > 1 and attends and number not in shares.sequence_of:
            raise StrategyError(
                where=next((fact.where for fact in graph.sequence_shardings), "strategy"),
                field="shard_sequence.filter", value=f"segment {number}",
                rule=f"has attention over a sequence cut in {ranks}, but no shard_sequence claims it",
                fix='add {"op": "shard_sequence", "filter": {"CP": "*"}}, or leave cp out of the mesh',
            )  # fmt: skip


def _check_heads(graph: Graph, shares: Shares) -> None:
    """Raise where ranks cannot have whole query heads (keys and values are repeated where they are fewer)."""
    for number in sorted({*shares.sequence_of, *shares.tensor_of}):
        sequence, tensor = shares.sequence_of.get(number), shares.tensor_of.get(number)
        turned = sequence is not None and sequence.method == "all_to_all"
        parts = shares.tensor_degree[number] * (shares.context_degree[number] if turned else 1)
        for operation in graph.model.segments[number].forward.operations:
            cut = turned or operation.tensor_dim == _HEADS
            if operation.kind is OpKind.ATTENTION and cut and operation.shape[_HEADS] % parts:
                heads, fact = operation.shape[_HEADS], tensor or sequence
                raise StrategyError(
                    where="strategy" if fact is None else fact.where, field="mesh.axes",
                    value=f"tp x cp = {parts}" if turned else f"tp = {parts}",
                    rule=f"does not divide the {heads} heads of segment {number}",
                    fix=f"use a divisor of {heads}",
                )  # fmt: skip

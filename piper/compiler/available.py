"""What directives can state but the passes do not realise yet: refused here, by name, and nowhere else.

Whoever realises a fact deletes its line.
"""

from __future__ import annotations

from collections.abc import Iterator

from piper.errors import StrategyError
from piper.graph import Graph, Replication
from simulator.plan import TaskKind

_Missing = tuple[str, str, object, str]
"""File and line, field, value, fix."""


def require_compilable(graph: Graph) -> None:
    """Raise StrategyError for the first statement of a directive that the passes would not follow."""
    for where, field, value, fix in _missing(graph):
        raise StrategyError(
            where=where, field=field, value=value, rule="is not available in this version", fix=fix
        )


def _missing(graph: Graph) -> Iterator[_Missing]:
    yield from _of_rows(graph)
    for fact in graph.replications:
        yield from _of_replication(fact)
    for tensor in graph.tensor_shardings:
        yield tensor.where, "shard_tensor", "tp", "use tp=1"
    for experts in graph.expert_shardings:
        yield experts.where, "shard", f"ep = {experts.degree}", "use ep=1"
    for sequence in graph.sequence_shardings:
        yield sequence.where, "shard_sequence", "cp", "use cp=1"
    for recomputed in graph.recomputations:
        if recomputed.mode == "selective":
            yield recomputed.where, "recompute.mode", "selective", 'use "full", or leave recompute out'
    for moved in graph.offloadings:
        yield moved.where, "offload.what", moved.what, "leave offload out"
    for mesh in graph.stage_meshes:
        yield mesh.where, "mesh.filter", dict(mesh.axes), "use one mesh for all stages"


def _of_rows(graph: Graph) -> Iterator[_Missing]:
    for number, row in enumerate(graph.rows):
        halves = {task.kind for slot in row for task in slot} & {TaskKind.BI, TaskKind.BW}
        if halves:
            where = graph.row_lines[number] if graph.row_lines else "strategy"
            custom = graph.schedule == "custom"
            value = ", ".join(sorted(kind.name for kind in halves)) if custom else graph.schedule
            field = "order.filters" if custom else "schedule"
            yield where, field, value, "use a schedule with fused backwards (B), such as 1f1b"


def _of_replication(fact: Replication) -> Iterator[_Missing]:
    stated: tuple[tuple[str, object, object, str], ...] = (
        ("shard_params", fact.zero == 3, False, "use zero=0 or zero=1"),  # noqa: PLR2004
        ("shard_grads", fact.zero == 2, False, "use zero=0 or zero=1"),  # noqa: PLR2004
        ("shard_ranks", fact.shard_ranks, None, "leave it out: ZeRO shards over all replicas"),
        ("bucket_mb", fact.bucket_bytes, None, "leave it out: one bucket per stage"),
        ("reduce", fact.reduce_every, "step", 'use "step"'),
        ("reduce_dtype", fact.reduce_dtype, "fp32", 'use "fp32"'),
        ("reduce_stream", fact.reduce_stream, "dp", "leave it out"),
        ("gather_stream", fact.gather_stream, "dp", "leave it out"),
    )
    for name, value, default, fix in stated:
        if value != default:
            yield fact.where, f"replicate.{name}", value, fix

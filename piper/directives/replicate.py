"""`replicate`: data parallelism with mean semantics, one reduction per step; ZeRO-1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from piper.graph.directive import (
    Directive,
    matched,
    not_yet,
    read_filter,
    read_flag,
    refuse_unknown_keys,
)
from piper.graph.facts import Replication, require_unclaimed
from piper.graph.filters import Filter
from piper.graph.graph import Graph
from simulator.plan import TaskKind

_LATER = ("shard_grads", "shard_params", "bucket_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate(Directive):
    """Keep equal parameters on all replicas of a stage: reduce their gradients once per step.

    rewrite: B(all microbatches) -> update
          -> B(all microbatches) -> all-reduce -> update                               (ZeRO 0)
          -> B(all microbatches) -> reduce-scatter -> update of a shard -> all-gather  (shard_optimizer)

    Args:
        filter: whole stages, by PP.
        axis: the mesh axis of the replicas.
        shard_optimizer: ZeRO-1: optimizer state is cut over the replicas.
    """

    op: ClassVar[str] = "replicate"
    keys: ClassVar[tuple[str, ...]] = (
        "filter", "axis", "devices", "shard_optimizer", "reduce_stream", "gather_stream", *_LATER,
    )  # fmt: skip

    filter: Filter
    axis: str = "dp"
    shard_optimizer: bool = False

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], *, where: str) -> Self:
        """Read `{"op": "replicate", "filter": {"PP": "*"}, "shard_optimizer": true}`."""
        refuse_unknown_keys(entry, cls.keys, where=where, op=cls.op)
        for name in _LATER:
            if entry.get(name):
                raise not_yet(
                    where,
                    f"replicate.{name}",
                    entry[name],
                    instead="leave it out; shard_optimizer is available",
                )
        axis = entry.get("axis", "dp")
        if axis != "dp":
            raise not_yet(where, "replicate.axis", axis, instead='replicas lie on the axis "dp"')
        flag = read_flag(entry.get("shard_optimizer", False), where=where, name="replicate.shard_optimizer")
        return cls(filter=read_filter(entry, where=where, op=cls.op), shard_optimizer=flag, where=where)

    def to_json(self) -> dict[str, Any]:
        """Return the file form."""
        flags = {"shard_optimizer": True} if self.shard_optimizer else {}
        stages = {c.tag: "*" if c.indices is None else sorted(c.indices) for c in self.filter.conditions}
        return {"op": self.op, "filter": stages, **flags}

    def apply(self, graph: Graph) -> Graph:
        """Record the replication of the matched stages."""
        found = {node.uid for node in matched(graph, self.filter, where=self.where, op=self.op)}
        stages = sorted({node.stage for node in graph.nodes if node.uid in found})
        for node in graph.nodes:
            if node.stage in stages and node.kind is TaskKind.B and node.uid not in found:
                raise not_yet(
                    self.where,
                    "replicate.filter",
                    self.filter.source,
                    instead="replicate whole stages, by their PP index",
                )
        segments = tuple(i for i, home in enumerate(graph.stage_of_segment) if home in stages)
        require_unclaimed(
            graph.replications, segments, where=self.where, op=self.op, value=self.filter.source
        )
        added = Replication(segments=segments, zero=1 if self.shard_optimizer else 0, where=self.where)
        return replace(graph, replications=(*graph.replications, added))

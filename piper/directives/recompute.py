"""`recompute`: throw activations away after the forward, and make them again before the backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from piper.errors import StrategyError
from piper.graph.directive import Directive, matched, not_yet, read_filter, refuse_unknown_keys
from piper.graph.filters import Filter
from piper.graph.graph import Graph
from simulator.plan import TaskKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute(Directive):
    """Keep only the inputs of the matched units between F and B; RNG is restored, so masks are the same.

    rewrite: F -> B  ->  F(keeps its input) -> R -> B

    Args:
        filter: the units, e.g. {"LAYER": "*"}.
        mode: "full".
    """

    op: ClassVar[str] = "recompute"
    keys: ClassVar[tuple[str, ...]] = ("filter", "mode")

    filter: Filter
    mode: str = "full"

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], *, where: str) -> Self:
        """Read `{"op": "recompute", "filter": {"LAYER": "*"}, "mode": "full"}`."""
        refuse_unknown_keys(entry, cls.keys, where=where, op=cls.op)
        mode = entry.get("mode", "full")
        if mode == "selective":
            raise not_yet(where, "recompute.mode", mode, instead='use "full"')
        if mode != "full":
            raise StrategyError(
                where=where, field="recompute.mode", value=mode, rule='must be "full"', fix='write "full"'
            )
        return cls(filter=read_filter(entry, where=where, op=cls.op), mode=mode, where=where)

    def to_json(self) -> dict[str, Any]:
        """Return the file form."""
        units = {c.tag: "*" if c.indices is None else sorted(c.indices) for c in self.filter.conditions}
        return {"op": self.op, "filter": units, "mode": self.mode}

    def apply(self, graph: Graph) -> Graph:
        """Mark F and B of the matched segments; the islands pass makes the R nodes."""
        found = matched(graph, self.filter, where=self.where, op=self.op)
        segments = {node.first_segment for node in found}
        with_backward = {n.first_segment for n in graph.nodes if n.kind is TaskKind.B}
        return graph.map_nodes({
            node.uid: replace(node, recomputed=True)
            for node in graph.nodes
            if node.first_segment in segments & with_backward
        })  # fmt: skip

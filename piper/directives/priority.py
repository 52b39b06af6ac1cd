"""`priority`: which stream of a device wins when several could run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from piper.graph.directive import Directive, read_name, read_whole_number, refuse_unknown_keys
from piper.graph.graph import Graph
from piper.graph.streams import state_rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Priority(Directive):
    """Let the kernels of a stream go before those of streams with a lower level.

    rewrite: collective on dp | collective on ep  ->  collective on ep first, then on dp

    Args:
        stream: its name: compute, tp, cp, ep, dp, pp, host, or as another directive calls it.
        level: higher wins; streams without a rule have 0.
    """

    op: ClassVar[str] = "priority"
    keys: ClassVar[tuple[str, ...]] = ("stream", "level")

    stream: str
    level: int

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], *, where: str) -> Self:
        """Read `{"op": "priority", "stream": "ep", "level": 1}`."""
        refuse_unknown_keys(entry, cls.keys, where=where, op=cls.op)
        return cls(
            stream=read_name(entry.get("stream"), where=where, name="priority.stream"),
            level=read_whole_number(entry.get("level"), where=where, name="priority.level", least=0),
            where=where,
        )

    def apply(self, graph: Graph) -> Graph:
        """State the level of the stream."""
        return state_rule(graph, self.stream, priority=self.level, where=self.where, op=self.op)

"""`offload`: state or activations wait on the host, and come back before they are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from piper.graph.directive import (
    Directive,
    claimed,
    read_choice,
    read_filter,
    read_name,
    read_whole_number,
    refuse_unknown_keys,
)
from piper.graph.facts import Offloading, require_unclaimed
from piper.graph.filters import Filter
from piper.graph.graph import Graph

WHAT = ("optimizer", "params", "activations")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload(Directive):
    """Copy to the host what is not needed for a while.

    rewrite: F -> B             ->  F -> offload ... reload -> B          (activations)
             B -> update        ->  B -> reload -> update -> offload      (optimizer)
             F -> B             ->  reload -> F ... reload -> B           (params)

    Args:
        filter: whose.
        what: "optimizer", "params" or "activations".
        prefetch: how many tasks of the compute stream before its use the copy back may start.
        stream: of the copies.
    """

    op: ClassVar[str] = "offload"
    keys: ClassVar[tuple[str, ...]] = ("filter", "what", "prefetch", "stream")

    filter: Filter
    what: str
    prefetch: int = 1
    stream: str = "host"

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], *, where: str) -> Self:
        """Read `{"op": "offload", "filter": {}, "what": "optimizer"}`."""
        refuse_unknown_keys(entry, cls.keys, where=where, op=cls.op)
        return cls(
            filter=read_filter(entry, where=where, op=cls.op),
            what=read_choice(entry.get("what"), WHAT, where=where, name="offload.what"),
            prefetch=read_whole_number(
                entry.get("prefetch", 1), where=where, name="offload.prefetch", least=0
            ),
            stream=read_name(entry.get("stream", "host"), where=where, name="offload.stream"),
            where=where,
        )

    def apply(self, graph: Graph) -> Graph:
        """State what the matched segments leave to the host; one claim for each kind of data."""
        segments = claimed(graph, self.filter, where=self.where, op=self.op)
        alike = [fact for fact in graph.offloadings if fact.what == self.what]
        require_unclaimed(alike, segments, where=self.where, op=self.op, value=self.filter.source)
        fact = Offloading(
            segments=segments, what=self.what, prefetch=self.prefetch, stream=self.stream, where=self.where
        )
        stated = sorted((*graph.offloadings, fact), key=lambda f: (f.segments, f.what))
        return replace(graph, offloadings=tuple(stated))

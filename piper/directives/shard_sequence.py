"""`shard_sequence`: context parallelism: the sequence is cut over the axis cp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from cost_models.ops import OpKind
from piper.errors import StrategyError
from piper.graph.directive import (
    Directive,
    claimed_regions,
    read_choice,
    read_devices,
    read_filter,
    read_flag,
    read_name,
    refuse_unknown_keys,
    state,
)
from piper.graph.facts import SequenceSharding
from piper.graph.filters import Filter
from piper.graph.graph import Graph

METHODS = ("ring", "all_to_all")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSequence(Directive):
    """Cut the tokens of every sequence over cp ranks; attention exchanges what it needs of the others.

    rewrite: F{CP} -> F{CP, part 1 of the keys} | ring shift -> ... -> F{CP, part cp}          (ring)
             F{CP} -> all-to-all(tokens to heads) -> F{CP} -> all-to-all(heads to tokens)      (all_to_all)

    Args:
        filter: the attention regions, tagged CP, within it, e.g. {"CP": "*"}.
        devices: the reference's device list; it must be that of the stages (checked when the file is read).
        method: "ring": keys and values go round; "all_to_all": tokens are exchanged for heads.
        balanced: each rank takes an early and a late piece, so that causal work is equal.
        stream: of the exchanges.
    """

    op: ClassVar[str] = "shard_sequence"
    keys: ClassVar[tuple[str, ...]] = ("filter", "devices", "device", "method", "balanced", "stream")

    filter: Filter
    devices: tuple[int, ...] | None = None
    method: str = "ring"
    balanced: bool = True
    stream: str = "cp"

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], *, where: str) -> Self:
        """Read `{"op": "shard_sequence", "filter": {"CP": "*"}, "method": "ring"}`."""
        refuse_unknown_keys(entry, cls.keys, where=where, op=cls.op)
        fields: dict[str, Any] = {
            name: reader(entry[name], where=where, name=f"shard_sequence.{name}")
            for name, reader in _READERS.items()
            if name in entry
        }
        return cls(
            filter=read_filter(entry, where=where, op=cls.op),
            devices=read_devices(entry, where=where, op=cls.op),
            where=where,
            **fields,
        )

    def apply(self, graph: Graph) -> Graph:
        """State that the sequence is cut, with the exchanges at the matched segments."""
        if graph.placed_mesh.size("cp") == 1:
            raise StrategyError(
                where=self.where, field="shard_sequence.filter", value=self.filter.source,
                rule="is cut over the axis cp, which has one rank",
                fix="leave shard_sequence out, or name cp in mesh",
            )  # fmt: skip
        segments = claimed_regions(graph, self.filter, "CP", where=self.where, op=self.op)
        unfused = (i for i in segments if self.method == "ring" and _has_several_kernels(graph, i))
        if next(unfused, None) is not None:
            raise StrategyError(
                where=self.where, field="shard_sequence.method", value=self.method,
                rule="passes keys and values on inside one kernel; this attention has several",
                fix="choose flash attention (--set model.attention=flash), or the method all_to_all",
            )  # fmt: skip
        fact = SequenceSharding(
            segments=segments,
            method=self.method,
            balanced=self.balanced,
            stream=self.stream,
            where=self.where,
        )
        return state(graph, "sequence_shardings", fact, op=self.op, value=self.filter.source)


def _has_several_kernels(graph: Graph, segment: int) -> bool:
    """Return whether a segment computes a softmax over scores of its own, as unfused attention does."""
    kinds = {operation.kind for operation in graph.model.segments[segment].forward.operations}
    return OpKind.SOFTMAX in kinds and OpKind.ATTENTION not in kinds


def _method(value: object, *, where: str, name: str) -> str:
    return read_choice(value, METHODS, where=where, name=name)


_READERS: dict[str, Any] = {"method": _method, "balanced": read_flag, "stream": read_name}

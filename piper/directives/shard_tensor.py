"""`shard_tensor`: tensor parallelism: the parameters of regions are cut over the axis tp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from piper.errors import StrategyError
from piper.graph.directive import (
    Directive,
    claimed,
    claimed_regions,
    read_choice,
    read_devices,
    read_filter,
    read_flag,
    read_name,
    refuse_unknown_keys,
    state,
)
from piper.graph.facts import TensorSharding
from piper.graph.filters import Filter
from piper.graph.graph import Graph

AXES = ("tp", "etp")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTensor(Directive):
    """Cut the parameters of the matched regions over the ranks of an axis: columns first, then rows.

    rewrite: F{before} -> F{TP} -> F{after}
          -> F{before} -> all-gather -> F{TP, its part} -> reduce-scatter -> F{after}   (sequence_parallel)
          -> F{before} -> F{TP, its part} -> all-reduce -> F{after}                     (else)

    Args:
        filter: the regions tagged TP within it, e.g. {"TP": "*"} or {"LAYER": "0-3"}.
        devices: the reference's device list; it must be that of the stages (checked when the file is read).
        axis: "tp"; "etp" for regions of experts that `shard` distributes: its tensor_degree says it.
        sequence_parallel: between the regions, activations are cut over the tokens; on, but off where
            `devices` are given, as in the reference.
        asynchronous: the collectives overlap with the matmuls that they feed.
        stream: of the collectives.
    """

    op: ClassVar[str] = "shard_tensor"
    keys: ClassVar[tuple[str, ...]] = (
        "filter", "devices", "device", "axis", "sequence_parallel", "asynchronous", "stream",
    )  # fmt: skip

    filter: Filter
    devices: tuple[int, ...] | None = None
    axis: str = "tp"
    sequence_parallel: bool = True
    asynchronous: bool = False
    stream: str = "tp"

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], *, where: str) -> Self:
        """Read `{"op": "shard_tensor", "filter": {"TP": "*"}}`."""
        refuse_unknown_keys(entry, cls.keys, where=where, op=cls.op)
        fields: dict[str, Any] = {
            name: reader(entry[name], where=where, name=f"shard_tensor.{name}")
            for name, reader in _READERS.items()
            if name in entry
        }
        devices = read_devices(entry, where=where, op=cls.op)
        fields.setdefault("sequence_parallel", devices is None)
        return cls(filter=read_filter(entry, where=where, op=cls.op), devices=devices, where=where, **fields)

    def apply(self, graph: Graph) -> Graph:
        """State that the matched regions are cut over tp, or check that `shard` cuts them over etp."""
        meant = claimed(graph, self.filter, where=self.where, op=self.op)
        if self.axis == "etp":
            return self._within_experts(graph, meant)
        if all(graph.axis_size("tp", stage=graph.stage_of_segment[i]) == 1 for i in meant):
            raise StrategyError(
                where=self.where, field="shard_tensor.axis", value="tp", rule="has one rank: nothing is cut",
                fix="leave shard_tensor out, or name tp in mesh",
            )  # fmt: skip
        self._refuse_owned_experts(graph, meant)
        segments = claimed_regions(graph, self.filter, "TP", where=self.where, op=self.op)
        fact = TensorSharding(
            segments=segments,
            sequence_parallel=self.sequence_parallel,
            asynchronous=self.asynchronous,
            stream=self.stream,
            where=self.where,
        )
        return state(graph, "tensor_shardings", fact, op=self.op, value=self.filter.source)

    def _refuse_owned_experts(self, graph: Graph, meant: tuple[int, ...]) -> None:
        """Raise when all that the filter means are experts that a shard distributes."""
        for owned in graph.expert_shardings:
            if set(meant) <= set(owned.segments):
                raise StrategyError(
                    where=self.where, field="shard_tensor.filter", value=self.filter.source,
                    rule=f"claims segment {min(meant)}, whose experts the shard at {owned.where} "
                    "distributes over ranks of the same axes",
                    fix='cut experts with "axis": "etp" and a mesh that names etp, or leave them out of one',
                )  # fmt: skip

    def _within_experts(self, graph: Graph, segments: tuple[int, ...]) -> Graph:
        cut = {i for owned in graph.expert_shardings if owned.tensor_degree > 1 for i in owned.segments}
        if not cut.issuperset(segments):
            raise StrategyError(
                where=self.where, field="shard_tensor.axis", value="etp",
                rule="is about regions whose experts a shard cuts, and these are not",
                fix="name etp in mesh and write a shard for the same regions",
            )  # fmt: skip
        return graph


def _axis(value: object, *, where: str, name: str) -> str:
    return read_choice(value, AXES, where=where, name=name)


_READERS: dict[str, Any] = {
    "axis": _axis,
    "sequence_parallel": read_flag,
    "asynchronous": read_flag,
    "stream": read_name,
}

"""`shard`: expert parallelism: experts are owned by different ranks, tokens travel to them and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from cost_models.errors import check_invariant
from piper.errors import StrategyError
from piper.graph.directive import (
    Directive,
    claimed_regions,
    read_choice,
    read_devices,
    read_factor,
    read_filter,
    read_name,
    read_whole_number,
    refuse_unknown_keys,
    state,
)
from piper.graph.facts import ExpertSharding
from piper.graph.filters import Filter
from piper.graph.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard(Directive):
    """Distribute the experts of the matched regions over ep ranks, each cut over etp ranks.

    rewrite: F{before} -> F{EP} -> F{after}
          -> F{before} -> all-to-all -> F{own experts} -> all-to-all -> F{after}, and the same for B

    Args:
        filter: the regions of experts, tagged EP, within it, e.g. {"EP": "*"}.
        devices: the reference's device list; it must be that of the stages (checked when the file is read).
        axis: the mesh axis, "ep".
        degree: ranks over which the experts are distributed; None: the mesh axis ep (filled in before use).
        tensor_degree: ranks that share one expert; None: the mesh axis etp (filled in before use).
        imbalance: tokens on the fullest rank / mean, >= 1.
        capacity: most tokens of an expert / mean, >= 1; None: no token is dropped.
        stream: of the all-to-alls.
    """

    op: ClassVar[str] = "shard"
    keys: ClassVar[tuple[str, ...]] = (
        "filter", "devices", "device", "axis", "degree", "tensor_degree", "imbalance", "capacity", "stream",
    )  # fmt: skip

    filter: Filter
    devices: tuple[int, ...] | None = None
    axis: str = "ep"
    degree: int | None = None
    tensor_degree: int | None = None
    imbalance: float = 1.0
    capacity: float | None = None
    stream: str = "ep"

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], *, where: str) -> Self:
        """Read `{"op": "shard", "filter": {"EP": "*"}, "degree": 8}`."""
        for name in ("gather_stream", "reduce_stream"):
            if name in entry:
                raise StrategyError(
                    where=where, field=f"shard.{name}", value=entry[name], rule="is a field of replicate",
                    fix="write it in replicate; the all-to-alls of shard run on `stream`",
                )  # fmt: skip
        refuse_unknown_keys(entry, cls.keys, where=where, op=cls.op)
        if "axis" in entry:
            read_choice(entry["axis"], ("ep",), where=where, name="shard.axis")
        fields: dict[str, Any] = {
            name: reader(entry[name], where=where, name=f"shard.{name}")
            for name, reader in _READERS.items()
            if entry.get(name) is not None
        }
        return cls(
            filter=read_filter(entry, where=where, op=cls.op),
            devices=read_devices(entry, where=where, op=cls.op),
            where=where,
            **fields,
        )

    def apply(self, graph: Graph) -> Graph:
        """State that the experts of the matched segments are distributed."""
        segments = claimed_regions(graph, self.filter, "EP", where=self.where, op=self.op)
        if not any(graph.model.segments[i].parameters for i in segments):
            raise StrategyError(
                where=self.where, field="shard.filter", value=self.filter.source,
                rule="means regions without parameters: there are no experts to distribute",
                fix='name the regions of experts, such as {"EP": "*"}',
            )  # fmt: skip
        parts: dict[tuple[int, int], list[int]] = {}
        for segment in segments:
            parts.setdefault(self._degrees(graph, graph.stage_of_segment[segment]), []).append(segment)
        for (degree, tensor_degree), owned in parts.items():
            fact = ExpertSharding(
                segments=tuple(owned),
                degree=degree,
                tensor_degree=tensor_degree,
                imbalance=self.imbalance,
                capacity=self.capacity,
                stream=self.stream,
                where=self.where,
            )
            graph = state(graph, "expert_shardings", fact, op=self.op, value=self.filter.source)
        return graph

    def _degrees(self, graph: Graph, stage: int) -> tuple[int, int]:
        """Return the degrees on the ranks of a stage, which its own mesh may state."""
        own = graph.stage_mesh(stage)
        stated = {} if own is None else dict(own.axes)
        degree, tensor_degree = stated.get("ep", self.degree or 0), stated.get("etp", self.tensor_degree or 0)
        check_invariant(min(degree, tensor_degree) > 0, "the degrees of shard were not filled in")
        alone = own is not None and bool(stated.keys() & {"ep", "etp"})
        where = own.where if own is not None and alone else self.where
        mesh = graph.placed_mesh
        ranks = mesh.num_ranks // graph.num_pipeline_ranks
        if degree * tensor_degree == 1 and not alone:
            raise StrategyError(
                where=where, field="shard.degree", value=1,
                rule="distributes nothing: one rank has all experts",
                fix="leave shard out, or name ep in mesh",
            )  # fmt: skip
        if ranks % (degree * tensor_degree):
            raise StrategyError(
                where=where, field="shard.degree", value=f"{degree} x {tensor_degree}",
                rule=f"does not divide the {ranks} ranks (dp x cp x tp) of a stage",
                fix=f"let ep x etp be a divisor of {ranks}",
            )  # fmt: skip
        return degree, tensor_degree


_READERS: dict[str, Any] = {
    "degree": read_whole_number,
    "tensor_degree": read_whole_number,
    "imbalance": read_factor,
    "capacity": read_factor,
    "stream": read_name,
}

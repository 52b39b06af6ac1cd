"""`place`: say on which pipeline rank a stage lives, and how many units of the model it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from piper.errors import StrategyError
from piper.graph.directive import (
    Directive,
    matched,
    read_filter,
    read_whole_number,
    refuse_unknown_keys,
)
from piper.graph.filters import Filter
from piper.graph.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Place(Directive):
    """Place the matched nodes on one pipeline rank (all its devices run them alike).

    rewrite: F{PP:0}, B{PP:0} on no device -> F{PP:0}, B{PP:0} on pipeline rank r

    Args:
        filter: what is placed; its PP index names a stage.
        pp: pipeline rank (coordinate on the mesh axis "pp"), when given as `at`.
        devices: instead of `at`, the reference's device list: equal lists are one pipeline rank.
        units: how many units of the model the stage takes (default: the default cut).
    """

    op: ClassVar[str] = "place"
    keys: ClassVar[tuple[str, ...]] = ("filter", "at", "devices", "device", "units", "stream")

    filter: Filter
    pp: int | None = None
    devices: tuple[int, ...] | None = None
    units: int | None = None

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], *, where: str) -> Self:
        """Read `{"op": "place", "filter": {"PP": 0}, "at": {"pp": 0}}`, or `devices` in place of `at`."""
        refuse_unknown_keys(entry, cls.keys, where=where, op=cls.op)
        which = read_filter(entry, where=where, op=cls.op)
        if which.exact("PP") is None:
            raise StrategyError(
                where=where, field="place.filter", value=which.source, rule="must name one stage",
                fix='write the stage as {"PP": 0}',
            )  # fmt: skip
        devices = entry.get("devices", entry.get("device"))
        if (devices is None) is ("at" not in entry):
            raise StrategyError(
                where=where,
                field="place.at",
                value=entry.get("at"),
                rule="or devices must be given, not both",
                fix='write "at": {"pp": 0}',
            )
        units = entry.get("units")
        return cls(
            filter=which,
            pp=None if devices is not None else _coordinate(entry["at"], where=where),
            devices=None if devices is None else _devices(devices, where=where),
            units=None if units is None else read_whole_number(units, where=where, name="place.units"),
            where=where,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the file form."""
        stage = {"PP": self.stage}
        home = {"devices": list(self.devices)} if self.devices is not None else {"at": {"pp": self.pp}}
        return {"op": self.op, "filter": stage, **home} | (
            {} if self.units is None else {"units": self.units}
        )

    @property
    def stage(self) -> int:
        """Return the stage it places."""
        return self.filter.exact("PP") or 0

    def apply(self, graph: Graph) -> Graph:
        """Set the pipeline rank of the matched nodes."""
        found = matched(graph, self.filter, where=self.where, op=self.op)
        ranks = graph.num_pipeline_ranks
        if self.pp is None or self.pp >= ranks:
            raise StrategyError(
                where=self.where,
                field="place.at.pp",
                value=self.pp,
                rule=f"is not a pipeline rank of {ranks}",
                fix=f"use 0..{ranks - 1}",
            )
        return graph.map_nodes({node.uid: replace(node, pipeline_rank=self.pp) for node in found})


def _coordinate(value: object, *, where: str) -> int:
    if not isinstance(value, Mapping) or set(value) != {"pp"}:
        raise StrategyError(
            where=where, field="place.at", value=value, rule="must name a position on the axis pp",
            fix='write "at": {"pp": 0}',
        )  # fmt: skip
    return read_whole_number(value["pp"], where=where, name="place.at.pp", least=0)


def _devices(value: object, *, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise StrategyError(
            where=where, field="place.devices", value=value, rule="must be a list of device numbers",
            fix='write for example "devices": [0, 1]',
        )  # fmt: skip
    return tuple(read_whole_number(item, where=where, name="place.devices", least=0) for item in value)

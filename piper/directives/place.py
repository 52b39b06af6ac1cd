"""`place`: say on which pipeline rank a stage lives, and how many units of the model it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from piper.errors import StrategyError
from piper.graph.directive import (
    Directive,
    matched,
    read_devices,
    read_filter,
    read_name,
    read_whole_number,
    refuse_unknown_keys,
)
from piper.graph.filters import Filter
from piper.graph.graph import Graph

_SLICES = ("dp", "cp", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place(Directive):
    """Place the matched nodes on one pipeline rank (all its devices run them alike).

    rewrite: F{PP:0}, B{PP:0} on no device -> F{PP:0}, B{PP:0} on pipeline rank r

    Args:
        filter: what is placed; its PP indices name stages, all on the same pipeline rank.
        pp: pipeline rank (coordinate on the mesh axis "pp"), when given as `at`.
        slices: (axis, text) pairs of `at` for the axes inside a stage: the whole axis, "*" or "0-3" of 4.
        devices: instead of `at`, the reference's device list: equal lists are one pipeline rank.
        units: how many units of the model each of the stages takes (default: the default cut).
        stream: name by which rules for the streams of transfers call these.
    """

    op: ClassVar[str] = "place"
    keys: ClassVar[tuple[str, ...]] = ("filter", "at", "devices", "device", "units", "stream")

    filter: Filter
    pp: int | None = None
    slices: tuple[tuple[str, str], ...] = ()
    devices: tuple[int, ...] | None = None
    units: int | None = None
    stream: str | None = None

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], *, where: str) -> Self:
        """Read `{"op": "place", "filter": {"PP": 0}, "at": {"pp": 0}}`, or `devices` in place of `at`."""
        _refuse_other_streams(entry, where=where)
        refuse_unknown_keys(entry, cls.keys, where=where, op=cls.op)
        which = read_filter(entry, where=where, op=cls.op)
        if not which.listed("PP"):
            raise StrategyError(
                where=where, field="place.filter", value=which.source, rule="must name stages",
                fix='write the stage as {"PP": 0}',
            )  # fmt: skip
        devices = read_devices(entry, where=where, op=cls.op)
        if (devices is None) is ("at" not in entry):
            raise StrategyError(
                where=where, field="place.at", value=entry.get("at"),
                rule="or devices must be given, not both", fix='write "at": {"pp": 0}',
            )  # fmt: skip
        pp, slices = (None, ()) if devices is not None else _coordinates(entry["at"], where=where)
        units, stream = entry.get("units"), entry.get("stream")
        return cls(
            filter=which,
            pp=pp,
            slices=slices,
            devices=devices,
            units=None if units is None else read_whole_number(units, where=where, name="place.units"),
            stream=None if stream is None else read_name(stream, where=where, name="place.stream"),
            where=where,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the file form."""
        at = {"pp": self.pp} | dict(self.slices)
        home = {"devices": list(self.devices)} if self.devices is not None else {"at": at}
        rest = {"units": self.units, "stream": self.stream}
        stated = {name: value for name, value in rest.items() if value is not None}
        return {"op": self.op, "filter": self.filter.to_json(), **home, **stated}

    @property
    def stages(self) -> tuple[int, ...]:
        """Return the stages it places, rising."""
        return self.filter.listed("PP")

    @property
    def is_whole(self) -> bool:
        """Return whether it speaks about whole stages: by PP alone."""
        return self.filter.tag_names == ("PP",) and self.filter.passes is None

    def apply(self, graph: Graph) -> Graph:
        """Set the pipeline rank of the matched nodes."""
        found = matched(graph, self.filter, where=self.where, op=self.op)
        ranks = graph.num_pipeline_ranks
        if self.pp is None or self.pp >= ranks:
            raise StrategyError(
                where=self.where, field="place.at.pp", value=self.pp,
                rule=f"is not a pipeline rank of {ranks}", fix=f"use 0..{ranks - 1}",
            )  # fmt: skip
        for axis, text in self.slices:
            for stage in self.stages:
                self._require_whole(axis, text, size=graph.axis_size(axis, stage=stage))
        placed = graph.map_nodes({node.uid: replace(node, pipeline_rank=self.pp) for node in found})
        if self.stream is None:
            return placed
        if placed.transfer_stream not in {"", self.stream}:
            raise StrategyError(
                where=self.where, field="place.stream", value=self.stream,
                rule=f"contradicts the stream {placed.transfer_stream} of another place",
                fix="give the same stream everywhere, or leave it out",
            )  # fmt: skip
        return replace(placed, transfer_stream=self.stream)

    def _require_whole(self, axis: str, text: str, *, size: int) -> None:
        positions = "0" if size == 1 else f"0-{size - 1}"
        if text not in {"*", positions}:
            raise StrategyError(
                where=self.where, field=f"place.at.{axis}", value=text,
                rule=f"is not all of the axis, which has the positions {positions}",
                fix='write "*": a stage takes all devices of its pipeline rank',
            )  # fmt: skip


def _refuse_other_streams(entry: Mapping[str, Any], *, where: str) -> None:
    for name in ("gather_stream", "reduce_stream"):
        if name in entry:
            raise StrategyError(
                where=where, field=f"place.{name}", value=entry[name], rule="is a field of replicate",
                fix="write it in replicate; the transfers of place run on `stream`",
            )  # fmt: skip


def _coordinates(value: object, *, where: str) -> tuple[int, tuple[tuple[str, str], ...]]:
    if not isinstance(value, Mapping) or "pp" not in value or set(value) - {"pp", *_SLICES}:
        raise StrategyError(
            where=where, field="place.at", value=value, rule="must name a position on the axis pp",
            fix='write "at": {"pp": 0}',
        )  # fmt: skip
    slices = tuple((axis, str(value[axis])) for axis in _SLICES if axis in value)
    return read_whole_number(value["pp"], where=where, name="place.at.pp", least=0), slices

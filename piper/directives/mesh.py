"""`mesh`: name the axes over which the ranks of a job are arranged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from cost_models.errors import nearest
from piper.errors import StrategyError
from piper.graph.directive import Directive, not_yet, read_whole_number, refuse_unknown_keys
from piper.graph.graph import Graph
from simulator.plan import Mesh as RankMesh

AXES = ("tp", "cp", "dp", "pp")
"""In rank order, fastest first (DESIGN 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh(Directive):
    """Arrange the ranks along named axes.

    rewrite: graph on no devices -> graph on pp x dp x cp x tp ranks, numbered tp fastest, then cp, dp, pp

    Args:
        axes: (name, size) pairs; an axis that is left out has size 1.
    """

    op: ClassVar[str] = "mesh"
    keys: ClassVar[tuple[str, ...]] = ("axes",)

    axes: tuple[tuple[str, int], ...]

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], *, where: str) -> Self:
        """Read `{"op": "mesh", "axes": {"pp": 4, "dp": 16}}`."""
        refuse_unknown_keys(entry, cls.keys, where=where, op=cls.op)
        axes = entry.get("axes")
        if not isinstance(axes, Mapping) or not axes:
            raise StrategyError(
                where=where, field="mesh.axes", value=axes, rule="must be an object of axis: size",
                fix='write for example {"pp": 4, "dp": 16}',
            )  # fmt: skip
        for name, size in axes.items():
            if name not in AXES:
                raise StrategyError(
                    where=where,
                    field="mesh.axes",
                    value=name,
                    rule="is not an axis",
                    fix=nearest(str(name), AXES),
                )
            read_whole_number(size, where=where, name=f"mesh.axes.{name}")
            if name in {"tp", "cp"} and size > 1:
                raise not_yet(
                    where, f"mesh.axes.{name}", size, instead=f"use {name} = 1; pp and dp can be larger"
                )
        return cls(axes=tuple((name, axes[name]) for name in AXES if name in axes), where=where)

    def to_json(self) -> dict[str, Any]:
        """Return the file form."""
        return {"op": self.op, "axes": dict(self.axes)}

    def apply(self, graph: Graph) -> Graph:
        """Set the mesh of the graph."""
        sizes = dict(self.axes)
        return replace(graph, mesh=RankMesh(axes=tuple((name, sizes.get(name, 1)) for name in AXES)))

    @property
    def num_ranks(self) -> int:
        """Return how many ranks the mesh has."""
        return math.prod(size for _, size in self.axes)

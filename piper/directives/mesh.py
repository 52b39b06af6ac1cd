"""`mesh`: name the axes over which the ranks of a job, or of some stages, are arranged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from cost_models.errors import nearest
from piper.errors import StrategyError
from piper.graph.directive import Directive, claimed, read_whole_number, refuse_unknown_keys, state
from piper.graph.facts import StageMesh
from piper.graph.filters import Filter
from piper.graph.graph import Graph
from simulator.plan import Mesh as RankMesh

AXES = ("tp", "cp", "dp", "pp")
"""In rank order, fastest first (DESIGN 3)."""
EXPERT_AXES = ("ep", "etp")
"""They regroup the tp x cp x dp ranks of a stage for its experts."""
HYBRID_AXES = ("dp_replicate", "dp_shard")
"""They divide dp: copies of the state, and ranks over which each copy is cut."""
_NAMES = (*AXES, *EXPERT_AXES, *HYBRID_AXES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh(Directive):
    """Arrange the ranks along named axes.

    rewrite: graph on no devices -> graph on pp x dp x cp x tp ranks, numbered tp fastest, then cp, dp, pp

    Args:
        axes: (name, size) pairs in the order of `AXES`, `EXPERT_AXES`, `HYBRID_AXES`; an axis that is left
            out has size 1, dp the product of dp_replicate and dp_shard.
        filter: the stages that are arranged so (None: all). Their tp x cp x dp is that of the others.
    """

    op: ClassVar[str] = "mesh"
    keys: ClassVar[tuple[str, ...]] = ("axes", "filter")

    axes: tuple[tuple[str, int], ...]
    filter: Filter | None = None

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], *, where: str) -> Self:
        """Read `{"op": "mesh", "axes": {"pp": 4, "dp": 16}}`; axes may be a list of [name, size] too."""
        refuse_unknown_keys(entry, cls.keys, where=where, op=cls.op)
        axes = _axes(entry.get("axes"), where=where)
        which = Filter.parse(entry["filter"], where=where, field="mesh.filter") if "filter" in entry else None
        if which is not None and (which.tag_names != ("PP",) or which.passes is not None):
            raise StrategyError(
                where=where, field="mesh.filter", value=which.source, rule="must name stages",
                fix='write the stages as {"PP": 0} or {"PP": [0, 3]}',
            )  # fmt: skip
        if which is not None and "pp" in axes:
            raise StrategyError(
                where=where, field="mesh.axes.pp", value=axes["pp"], rule="is not an axis inside a stage",
                fix="name pp in the mesh without filter",
            )  # fmt: skip
        _check_hybrid(axes, where=where)
        return cls(
            axes=tuple((name, axes[name]) for name in _NAMES if name in axes), filter=which, where=where
        )

    def to_json(self) -> dict[str, Any]:
        """Return the file form."""
        which = {} if self.filter is None else {"filter": self.filter.to_json()}
        return {"op": self.op, "axes": dict(self.axes), **which}

    def size(self, axis: str) -> int:
        """Return the size of an axis; dp follows from dp_replicate and dp_shard where it is left out."""
        sizes = dict(self.axes)
        if axis == "dp" and "dp" not in sizes:
            return math.prod(sizes.get(name, 1) for name in HYBRID_AXES)
        return sizes.get(axis, 1)

    @property
    def shard_ranks(self) -> int | None:
        """Return over how many ranks a copy of the state is cut (HSDP), or None when it says nothing."""
        sizes = dict(self.axes)
        if not sizes.keys() & set(HYBRID_AXES):
            return None
        return (
            self.size("dp")
            // sizes.get("dp_replicate", self.size("dp") // sizes.get("dp_shard", 1))
            * (self.size("cp"))
        )

    @property
    def ranks_of_stage(self) -> int:
        """Return tp x cp x dp."""
        return self.size("tp") * self.size("cp") * self.size("dp")

    def apply(self, graph: Graph) -> Graph:
        """Set the mesh of the graph, or state that of some stages."""
        if self.filter is None:
            axes = tuple((name, self.size(name)) for name in AXES)
            return replace(graph, mesh=RankMesh(axes=axes), mesh_line=self.where)
        wanted = graph.placed_mesh.num_ranks // graph.num_pipeline_ranks
        if self.ranks_of_stage != wanted:
            raise StrategyError(
                where=self.where, field="mesh.axes", value=dict(self.axes),
                rule=f"has {self.ranks_of_stage} ranks, the other stages have {wanted}",
                fix=f"let tp x cp x dp be {wanted}",
            )  # fmt: skip
        cp = graph.placed_mesh.size("cp")
        if self.size("cp") != cp:
            raise StrategyError(
                where=self.where, field="mesh.axes.cp", value=self.size("cp"),
                rule=f"differs from cp = {cp} of the other stages: tokens are handed on rank by rank",
                fix=f"let cp be {cp} in all meshes",
            )  # fmt: skip
        segments = claimed(graph, self.filter, where=self.where, op=self.op)
        axes = tuple((name, self.size(name)) for name in ("tp", "cp", "dp"))
        axes += tuple((name, size) for name, size in self.axes if name in EXPERT_AXES)
        fact = StageMesh(segments=segments, axes=axes, shard_ranks=self.shard_ranks, where=self.where)
        return state(graph, "stage_meshes", fact, op=self.op, value=self.filter.source)


def _axes(value: object, *, where: str) -> dict[str, int]:
    pairs = _pairs(value)
    if not pairs:
        raise StrategyError(
            where=where, field="mesh.axes", value=value, rule="must be an object of axis: size",
            fix='write for example {"pp": 4, "dp": 16}',
        )  # fmt: skip
    found: dict[str, int] = {}
    for name, size in pairs:
        if name not in _NAMES:
            raise StrategyError(
                where=where, field="mesh.axes", value=name, rule="is not an axis",
                fix=nearest(str(name), _NAMES),
            )  # fmt: skip
        if name in found:
            raise StrategyError(
                where=where, field="mesh.axes", value=name, rule="is given twice", fix="keep one"
            )
        found[name] = read_whole_number(size, where=where, name=f"mesh.axes.{name}")
    return found


def _pairs(value: object) -> list[tuple[object, object]]:
    """Return the (axis, size) pairs of an object or of a list of lists; empty for anything else."""
    if isinstance(value, Mapping):
        return list(value.items())
    found: list[tuple[object, object]] = []
    for pair in value if isinstance(value, list) else []:
        match pair:
            case [axis, size]:
                found.append((axis, size))
            case _:
                return []
    return found


def _check_hybrid(axes: Mapping[str, int], *, where: str) -> None:
    given = {name: axes[name] for name in HYBRID_AXES if name in axes}
    product = math.prod(given.values())
    dp = axes.get("dp", product)
    if (len(given) == len(HYBRID_AXES) and product != dp) or dp % product:
        raise StrategyError(
            where=where, field="mesh.axes", value=dict(axes),
            rule=f"has dp = {dp}, but dp_replicate x dp_shard = {product}",
            fix="let dp be the product of dp_replicate and dp_shard, or leave it out",
        )  # fmt: skip

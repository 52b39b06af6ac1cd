"""A resolved strategy meets the model: the cut, and the complete list of directives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from piper.directives import Mesh, Order, Place, Replicate, Shard, Split
from piper.errors import StrategyError
from piper.graph import CapturedModel, default_cut, stages_of_segments, units_of
from piper.graph.directive import Directive
from piper.graph.graph import Rows
from piper.schedules import copies_of, find_schedule, schedule_rows, stages_of
from piper.schedules.copies import Copies, in_model_stages
from piper.strategy.cuts import units_of_stages
from piper.strategy.expand import directives_of_shorthand
from piper.strategy.pass_costs import pass_costs
from piper.strategy.places import default_places, joined, places_of_stages
from piper.strategy.resolve import CUSTOM, DEFAULT_SCHEDULE, Resolved

_COMPLETED = Mesh | Place | Split | Order


def complete(resolved: Resolved, model: CapturedModel) -> tuple[tuple[int, ...], tuple[Directive, ...]]:
    """Return the stage of every segment, and directives that leave nothing open.

    Raises: StrategyError when the cut or the schedule does not suit the model.
    """
    stated = resolved.strategy.directives
    _require_experts(resolved)
    listed = [d for d in stated if isinstance(d, Place)]
    places = _places(resolved, listed)
    counts = _unit_counts(resolved, places, model)
    if resolved.shorthand.cut is not None:
        places = tuple(replace(place, units=count) for place, count in zip(places, counts, strict=True))
    directives: list[Directive] = [_mesh(resolved), *resolved.strategy.stage_meshes]
    directives += joined(places)
    directives += [place for place in listed if not place.is_whole]
    directives.append(resolved.split)
    if stated:
        directives += [_filled_in(d, resolved) for d in stated if not isinstance(d, _COMPLETED)]
    else:
        directives += directives_of_shorthand(resolved, model)
    rows = [d for d in stated if isinstance(d, Order) and d.schedule is None]
    dimension = resolved.split.dim_name
    directives += [replace(d, dimension=dimension) for d in rows]
    if resolved.schedule != CUSTOM:
        directives.append(_named_order(resolved, places, model))
    return stages_of_segments(units_of(model), counts), tuple(directives)


def _mesh(resolved: Resolved) -> Mesh:
    axes = {"tp": resolved.tp, "cp": resolved.cp, "dp": resolved.dp, "pp": resolved.pp}
    named = tuple((name, size) for name, size in axes.items() if size > 1 or name in {"dp", "pp"})
    return Mesh(axes=named, where=resolved.strategy.line_of(Mesh))


def _require_experts(resolved: Resolved) -> None:
    """Raise for expert axes of a file that no shard uses."""
    stated = resolved.strategy.directives
    sizes = {"ep": resolved.shorthand.ep or 1, "etp": resolved.shorthand.etp or 1}
    if not stated or max(sizes.values()) == 1 or any(isinstance(d, Shard) for d in stated):
        return
    axis = max(sizes, key=lambda name: sizes[name])
    raise StrategyError(
        where=resolved.strategy.line_of(Mesh), field=f"mesh.axes.{axis}", value=sizes[axis],
        rule="is an axis for experts, but no shard distributes any",
        fix=f'add {{"op": "shard", "filter": {{"EP": "*"}}}}, or leave {axis} out',
    )  # fmt: skip


def _places(resolved: Resolved, listed: Sequence[Place]) -> tuple[Place, ...]:
    if listed:
        return places_of_stages(listed, num_pipeline_ranks=resolved.pp)
    return default_places(_scheduled_stages(resolved), where=resolved.strategy.where)


def _scheduled_stages(resolved: Resolved) -> tuple[tuple[int, ...], ...]:
    """Return the stages whose first home each pipeline rank is, as the schedule lays them.

    Raises: StrategyError when a rank cannot hold a stage of every copy.
    """
    number = _copies(resolved).count
    if resolved.vp % number:
        raise StrategyError(
            where=resolved.strategy.line_of(Order), field="vp", value=resolved.vp,
            rule=f"does not divide into the {number} copies of the model that {_layout(resolved)} places",
            fix=f"leave vp out, or give a multiple of {number}",
        )  # fmt: skip
    virtual = stages_of(
        _layout(resolved),
        num_pipeline_ranks=resolved.pp,
        virtual_stages_per_rank=resolved.vp,
        where=resolved.strategy.where,
    )
    number = _copies(resolved).stages_of_a_copy
    return tuple(tuple(stage for stage in held if stage < number) for held in virtual)


def _layout(resolved: Resolved) -> str:
    return DEFAULT_SCHEDULE if resolved.schedule == CUSTOM else resolved.schedule


def _copies(resolved: Resolved) -> Copies:
    count = copies_of(find_schedule(_layout(resolved), where=resolved.strategy.where))
    return Copies(num_stages=resolved.pp * resolved.vp, count=count)


def _unit_counts(resolved: Resolved, places: Sequence[Place], model: CapturedModel) -> tuple[int, ...]:
    units = units_of(model)
    if resolved.shorthand.cut is not None:
        return units_of_stages(
            model,
            resolved.shorthand.cut,
            ranks=_ranks(resolved, places),
            recompute=resolved.shorthand.recompute or "none",
            where=resolved.strategy.where,
        )
    stated = [place.units for place in places if place.units is not None]
    if not stated:
        return default_cut(units, len(places), where=resolved.strategy.line_of(Place, Mesh))
    if len(stated) != len(places) or sum(stated) != units.count:
        raise StrategyError(
            where=places[0].where, field="place.units", value=stated,
            rule=f"must be given for every stage and add up to the model's {units.count} units",
            fix=f"the default cut is {default_cut(units, len(places), where=places[0].where)}",
        )  # fmt: skip
    return tuple(stated)


def _ranks(resolved: Resolved, places: Sequence[Place]) -> list[int]:
    """Return a pipeline rank for each stage; two that hold the same stages are one."""
    ranks = [place.pp or 0 for place in places]
    pairs = _copies(resolved).count > 1
    return [min(rank, resolved.pp - 1 - rank) if pairs else rank for rank in ranks]


def _filled_in(directive: Directive, resolved: Resolved) -> Directive:
    """Return a directive with the degrees that it takes from the mesh."""
    stated = resolved.shorthand
    if isinstance(directive, Shard):
        _require_agreement(directive, "degree", value=directive.degree, other=_axis(resolved, "ep"))
        _require_agreement(
            directive, "tensor_degree", value=directive.tensor_degree, other=_axis(resolved, "etp")
        )
        for stage_mesh in resolved.strategy.stage_meshes:
            sizes = dict(stage_mesh.axes)
            for field, axis in (("degree", "ep"), ("tensor_degree", "etp")):
                stated_degree = (sizes.get(axis), stage_mesh.where)
                _require_agreement(directive, field, value=getattr(directive, field), other=stated_degree)
        return replace(
            directive,
            degree=directive.degree or stated.ep or 1,
            tensor_degree=directive.tensor_degree or stated.etp or 1,
        )
    if isinstance(directive, Replicate) and directive.zero:
        mesh = _stated_mesh(resolved)
        stated_ranks = (mesh.shard_ranks, mesh.where) if mesh else None
        _require_agreement(directive, "shard_ranks", value=directive.shard_ranks, other=stated_ranks)
        for stage_mesh in resolved.strategy.stage_meshes:
            own = (stage_mesh.shard_ranks, stage_mesh.where)
            _require_agreement(directive, "shard_ranks", value=directive.shard_ranks, other=own)
        return replace(directive, shard_ranks=directive.shard_ranks or stated.hsdp)
    return directive


def _stated_mesh(resolved: Resolved) -> Mesh | None:
    meshes = (d for d in resolved.strategy.directives if isinstance(d, Mesh) and d.filter is None)
    return next(meshes, None)


def _axis(resolved: Resolved, name: str) -> tuple[int | None, str] | None:
    """Return the size of an axis that the mesh of the file names, and where."""
    mesh = _stated_mesh(resolved)
    return None if mesh is None else (dict(mesh.axes).get(name), mesh.where)


def _require_agreement(
    directive: Directive, field: str, *, value: int | None, other: tuple[int | None, str] | None
) -> None:
    """Raise when a directive and the mesh state the same quantity with two values."""
    if value is None or other is None or other[0] in {None, value}:
        return
    raise StrategyError(
        where=directive.where, field=f"{directive.op}.{field}", value=value,
        rule=f"contradicts {other[0]}, which the mesh at {other[1]} says", fix="give it once, or equal",
    )  # fmt: skip


def _named_order(resolved: Resolved, places: Sequence[Place], model: CapturedModel) -> Order:
    orders = [d for d in resolved.strategy.directives if isinstance(d, Order)]
    where = orders[0].where if orders else resolved.strategy.where
    copies = _copies(resolved)
    if len(places) != copies.stages_of_a_copy:
        raise StrategyError(
            where=where, field="schedule", value=resolved.schedule,
            rule=f"has {copies.stages_of_a_copy} stages on {resolved.pp} ranks, but {len(places)} are placed",
            fix="write the order of each pipeline rank, or place as many stages as the schedule has",
        )  # fmt: skip
    rows = schedule_rows(
        resolved.schedule,
        num_pipeline_ranks=resolved.pp,
        num_microbatches=len(resolved.sizes),
        virtual_stages_per_rank=resolved.vp,
        costs=pass_costs(model),
        where=where,
    )
    order = orders[0] if orders else Order(schedule=resolved.schedule, where=where)
    return replace(order, rows=_at_home(in_model_stages(rows, copies), resolved, places, where=where))


def _at_home(rows: Rows, resolved: Resolved, places: Sequence[Place], *, where: str) -> Rows:
    """Return the rows by pipeline rank as placed: a rank takes the row with exactly its stages."""
    scheduled = _scheduled_stages(resolved)
    row_of = {frozenset(stages): row for stages, row in zip(scheduled, rows, strict=True)}
    found = []
    for rank in range(resolved.pp):
        held = frozenset(stage for stage, place in enumerate(places) if place.pp == rank)
        if held not in row_of:
            raise StrategyError(
                where=where, field="schedule", value=resolved.schedule,
                rule=f"does not put the stages {sorted(held)} together, "
                f"which are placed on pipeline rank {rank}",
                fix=f"place them as {[list(stages) for stages in scheduled]}",
            )  # fmt: skip
        found.append(row_of[held])
    return tuple(found)

"""A resolved strategy meets the model: the cut, and the complete list of directives."""

from __future__ import annotations

from piper.directives import Mesh, Order, Place, Recompute, Replicate
from piper.errors import StrategyError
from piper.graph import CapturedModel, Filter, default_cut, stages_of_segments, units_of
from piper.graph.directive import Directive
from piper.schedules import schedule_rows
from piper.strategy.resolve import Resolved


def complete(resolved: Resolved, model: CapturedModel) -> tuple[tuple[int, ...], tuple[Directive, ...]]:
    """Return the stage of every segment, and directives that leave nothing open.

    Raises: StrategyError when the cut or the schedule does not suit the model.
    """
    stated = resolved.strategy.directives
    places = _places(resolved)
    counts = _unit_counts(resolved, places, model)
    rows = tuple(d for d in stated if isinstance(d, Order) and d.schedule is None)
    directives: list[Directive] = [Mesh(axes=(("dp", resolved.dp), ("pp", resolved.pp)))]
    directives += places
    directives.append(resolved.split)
    if stated:
        directives += [d for d in stated if isinstance(d, Replicate | Recompute)]
    else:
        directives += _from_shorthand(resolved, model)
    directives += rows or (_named_order(resolved, len(places)),)
    return stages_of_segments(units_of(model), counts), tuple(directives)


def _places(resolved: Resolved) -> list[Place]:
    listed = sorted((d for d in resolved.strategy.directives if isinstance(d, Place)), key=lambda d: d.stage)
    if not listed:
        where = resolved.strategy.where
        return [
            Place(filter=Filter.parse({"PP": stage}, where=where), pp=stage, where=where)
            for stage in range(resolved.pp)
        ]
    last = {place.stage: place for place in listed}
    if list(last) != list(range(len(last))):
        raise StrategyError(
            where=listed[0].where, field="place.filter", value=f"stages {sorted(last)}",
            rule="must be numbered from 0 without a gap", fix="place every stage once",
        )  # fmt: skip
    empty = set(range(resolved.pp)) - {place.pp for place in last.values()}
    if empty:
        raise StrategyError(
            where=listed[0].where, field="mesh.axes.pp", value=resolved.pp,
            rule=f"leaves pipeline rank {min(empty)} without a stage", fix="place a stage on it, or lower pp",
        )  # fmt: skip
    return list(last.values())


def _unit_counts(resolved: Resolved, places: list[Place], model: CapturedModel) -> tuple[int, ...]:
    units = units_of(model)
    stated = [place.units for place in places if place.units is not None]
    if not stated:
        return default_cut(units, len(places), where=resolved.strategy.where)
    if len(stated) != len(places) or sum(stated) != units.count:
        raise StrategyError(
            where=places[0].where, field="place.units", value=stated,
            rule=f"must be given for every stage and add up to the model's {units.count} units",
            fix=f"the default cut is {default_cut(units, len(places), where=places[0].where)}",
        )  # fmt: skip
    return tuple(stated)


def _from_shorthand(resolved: Resolved, model: CapturedModel) -> list[Directive]:
    where, stated = resolved.strategy.where, resolved.shorthand
    found: list[Directive] = []
    if stated.recompute == "full":
        tag = "LAYER" if any("LAYER" in dict(s.tags) for s in model.segments) else "PP"
        found.append(Recompute(filter=Filter.parse({tag: "*"}, where=where), where=where))
    if resolved.dp > 1 or stated.zero:
        everything = Filter.parse({"PP": "*"}, where=where)
        found.append(Replicate(filter=everything, shard_optimizer=bool(stated.zero), where=where))
    return found


def _named_order(resolved: Resolved, num_stages: int) -> Order:
    name = resolved.shorthand.schedule or ""
    if num_stages != resolved.pp:
        raise StrategyError(
            where=resolved.strategy.where, field="schedule", value=name,
            rule=f"has one stage per pipeline rank, but {num_stages} stages are placed on {resolved.pp}",
            fix="write the order of each pipeline rank, or place one stage on each",
        )  # fmt: skip
    rows = schedule_rows(
        name,
        num_pipeline_ranks=resolved.pp,
        num_microbatches=len(resolved.sizes),
        where=resolved.strategy.where,
    )
    return Order(schedule=name, rows=rows, where=resolved.strategy.where)

"""Where stages live: device lists become positions on a mesh, and every stage gets one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from piper.directives import Mesh, Place, Replicate, Shard, ShardSequence, ShardTensor
from piper.errors import StrategyError
from piper.graph import Filter
from piper.graph.directive import Directive
from piper.strategy.device_meshes import meshes_of_lists


def with_places(directives: tuple[Directive, ...]) -> tuple[Directive, ...]:
    """Return directives in which device lists became positions on a mesh.

    The reference's device numbers are symbolic: equal lists are one pipeline rank, ordered by their
    lowest number. The members of a list are replicas or the ranks of the axis tp (`device_meshes`); a
    `shard` distributes experts over all of them.

    A place all of whose stages a later one places again is left out first.

    Raises: StrategyError for lists that contradict each other.
    """
    directives = _without_overridden(directives)
    places = [d for d in directives if isinstance(d, Place)]
    listed = [place for place in places if place.devices is not None]
    lists = sorted({place.devices for place in listed if place.devices is not None})
    _check_other_lists(directives, lists)
    if not listed:
        return directives
    if len(listed) != len(places):
        raise StrategyError(
            where=places[0].where, field="place.devices", value="some", rule="are given on some places only",
            fix='use "at" or "devices" throughout',
        )  # fmt: skip
    if len({len(devices) for devices in lists}) != 1:
        raise StrategyError(
            where=listed[0].where, field="place.devices", value=[list(d) for d in lists],
            rule="must all have the same length", fix="give every stage the same number of devices",
        )  # fmt: skip
    _require_groups(listed)
    size = len(lists[0])
    mesh, *alone = meshes_of_lists(directives, lists)
    stated = [d for d in directives if isinstance(d, Mesh) and d.filter is None]
    if stated and (stated[0].ranks_of_stage, stated[0].size("pp")) != (size, len(lists)):
        raise StrategyError(
            where=stated[0].where, field="mesh.axes", value=dict(stated[0].axes),
            rule=f"contradicts the device lists, which say {dict(mesh.axes)}", fix="make them agree",
        )  # fmt: skip
    placed = tuple(
        replace(d, pp=lists.index(d.devices), devices=None)
        if isinstance(d, Place) and d.devices is not None
        else d
        for d in directives
    )
    return placed if stated else (mesh, *alone, *(_over_whole_groups(d, size) for d in placed))


def _without_overridden(directives: Sequence[Directive]) -> tuple[Directive, ...]:
    """Return directives without the device lists that later ones override for all their stages."""
    kept: list[Directive] = []
    placed: set[int] = set()
    for directive in reversed(directives):
        if isinstance(directive, Place) and directive.devices is not None and directive.is_whole:
            if placed.issuperset(directive.stages):
                continue
            placed.update(directive.stages)
        kept.append(directive)
    return tuple(reversed(kept))


def _over_whole_groups(directive: Directive, size: int) -> Directive:
    """Return a `shard` that says no degree with that of a device list, as in the reference."""
    if isinstance(directive, Shard) and directive.degree is None and directive.tensor_degree is None:
        return replace(directive, degree=size)
    return directive


def _check_other_lists(directives: Sequence[Directive], lists: Sequence[tuple[int, ...]]) -> None:
    """Raise unless the devices of other directives are those of one stage, or of several whole ones."""
    kinds = Replicate | Shard | ShardTensor | ShardSequence
    for directive in (d for d in directives if isinstance(d, kinds) and d.devices is not None):
        devices = set(directive.devices or ())
        whole = [set(group) for group in lists if set(group) <= devices]
        if not whole or set().union(*whole) != devices:
            raise StrategyError(
                where=directive.where, field=f"{directive.op}.devices", value=list(directive.devices or ()),
                rule="is not the device list of a place", fix="leave it out: the stage's devices are meant",
            )  # fmt: skip


def _require_groups(places: Sequence[Place]) -> None:
    """Raise unless device lists are groups: no device twice in one, none in two that differ."""
    group_of: dict[int, tuple[int, ...]] = {}
    for place in places:
        devices = place.devices or ()
        shared = [device for device in devices if group_of.setdefault(device, devices) != devices]
        if shared or len(set(devices)) < len(devices):
            rule = (
                f"shares device {shared[0]} with {list(group_of[shared[0]])}"
                if shared
                else "repeats a device"
            )
            raise StrategyError(
                where=place.where, field="place.devices", value=list(devices), rule=rule,
                fix="give each stage devices of its own, or exactly those of another stage",
            )  # fmt: skip


def places_of_stages(stated: Sequence[Place], *, num_pipeline_ranks: int) -> tuple[Place, ...]:
    """Return one place per stage, rising; a later place overrides an earlier one, as in the reference.

    Raises: StrategyError for gaps in the numbers of stages, and for pipeline ranks without a stage.
    """
    last = {stage: place for place in stated if place.is_whole for stage in place.stages}
    where = stated[0].where
    if sorted(last) != list(range(len(last))) or not last:
        raise StrategyError(
            where=where, field="place.filter", value=f"stages {sorted(last)}",
            rule="must be numbered from 0 without a gap", fix="place every stage once",
        )  # fmt: skip
    empty = set(range(num_pipeline_ranks)) - {place.pp for place in last.values()}
    if empty:
        raise StrategyError(
            where=where, field="mesh.axes.pp", value=num_pipeline_ranks,
            rule=f"leaves pipeline rank {min(empty)} without a stage", fix="place a stage on it, or lower pp",
        )  # fmt: skip
    return tuple(
        replace(last[stage], filter=Filter.parse({"PP": stage}, where=last[stage].where))
        for stage in range(len(last))
    )


def joined(places: Sequence[Place]) -> tuple[Place, ...]:
    """Return places in which stages that lie and were stated alike share one."""
    alike: dict[tuple[object, ...], list[Place]] = {}
    for place in places:
        key = (place.pp, place.slices, place.units, place.stream, place.where)
        alike.setdefault(key, []).append(place)
    return tuple(
        replace(
            found[0],
            filter=Filter.parse({"PP": [s for place in found for s in place.stages]}, where=found[0].where),
        )
        if len(found) > 1
        else found[0]
        for found in alike.values()
    )


def default_places(stages: Sequence[Sequence[int]], *, where: str) -> tuple[Place, ...]:
    """Return the places of stages, given those of each pipeline rank."""
    home = {stage: rank for rank, held in enumerate(stages) for stage in held}
    return tuple(
        Place(filter=Filter.parse({"PP": stage}, where=where), pp=home[stage], where=where)
        for stage in sorted(home)
    )

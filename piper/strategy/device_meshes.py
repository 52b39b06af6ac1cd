"""Which meshes the published system's device lists say: replicas, or ranks of the axis tp, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from piper.directives import Mesh, Place, Replicate, ShardTensor
from piper.graph import Filter
from piper.graph.directive import Directive


def meshes_of_lists(directives: Sequence[Directive], lists: Sequence[tuple[int, ...]]) -> tuple[Mesh, ...]:
    """Return the mesh of a job that is placed by device lists, and that of stages which differ.

    The members of a list are replicas, or, where a `shard_tensor` cuts regions over them, the ranks of tp. A
    `shard_tensor` that names stages, by PP or by its own device list, leaves the other stages to `replicate`.
    """
    places = [d for d in directives if isinstance(d, Place) and d.devices is not None]
    home = {stage: place.devices or () for place in places if place.is_whole for stage in place.stages}
    size, where = len(lists[0]), places[0].where
    cuts = [d for d in directives if isinstance(d, ShardTensor) and d.axis == "tp"]
    whole = Mesh(axes=(("tp" if cuts else "dp", size), ("pp", len(lists))), where=where)
    cut = {stage for directive in cuts for stage in _meant(directive, home)}
    others = home.keys() - cut
    replicated = {s for d in directives if isinstance(d, Replicate) for s in _meant(d, home)}
    shared = {home[stage] for stage in cut} & {home[stage] for stage in others}
    if size == 1 or not cut or not others or not others <= replicated or shared:
        return (whole,)
    which = Filter.parse({"PP": sorted(cut)}, where=cuts[0].where)
    alone = Mesh(axes=(("tp", size),), filter=which, where=cuts[0].where)
    return Mesh(axes=(("dp", size), ("pp", len(lists))), where=where), alone


def _meant(directive: ShardTensor | Replicate, home: Mapping[int, tuple[int, ...]]) -> set[int]:
    """Return the stages that a directive may mean, by its devices and by PP."""
    devices = None if directive.devices is None else set(directive.devices)
    stages = directive.filter.condition("PP")
    return {
        stage
        for stage, group in home.items()
        if (devices is None or devices.issuperset(group)) and (stages is None or stages.holds({"PP": stage}))
    }

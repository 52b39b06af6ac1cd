"""The thin model: one unit of every kind, so that what a unit costs is found without its repetitions.

[Note: kinds of units]
Two units of a model are of one kind when their segments are equal but for names and the numbers of tags: the
same kernels, kept bytes and shapes, inputs from the same places inside the unit, and equal tensors from
outside. A stage costs what its units cost, so a model of any depth is priced by its kinds: 80 equal layers
are one. An input from a unit that is left out comes from the first unit of the same kind: it is as large.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from piper.graph import CapturedModel, CapturedSegment, units_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """The kinds of a model's units; see [Note: kinds of units].

    Args:
        of_unit: kind of every unit of the model.
        units: the first unit of each kind, rising: what a thin model has.
        layers: for each kind, whether its units are layers (tagged LAYER).
        shared: (unit, other unit, elements): trained parameters that both use.
    """

    of_unit: tuple[int, ...]
    units: tuple[int, ...]
    layers: tuple[bool, ...]
    shared: tuple[tuple[int, int, int], ...]

    @property
    def count(self) -> int:
        """Return the number of kinds."""
        return len(self.units)


def kinds_of(model: CapturedModel) -> Kinds:
    """Return the kinds of a model's units."""
    of_segment = units_of(model).of_segment
    firsts = _firsts(of_segment)
    shapes = {p.name: (p.shape, p.trainable) for p in model.parameters}
    owner: dict[str, int] = {}
    shared: dict[tuple[int, int], int] = {}
    known: dict[Hashable, int] = {}
    of_unit: list[int] = []
    for unit, (first, last) in enumerate(zip(firsts, [*firsts[1:], len(of_segment)], strict=True)):
        names = dict.fromkeys(name for n in range(first, last) for name in model.segments[n].parameters)
        for name in names:
            home = owner.setdefault(name, unit)
            if home != unit:
                shared[home, unit] = shared.get((home, unit), 0) + model.trained_numel.get(name, 0)
        segments = tuple(
            _signature(model, number, first=first, shapes=shapes) for number in range(first, last)
        )
        key = (segments, tuple(owner[name] != unit for name in names))
        of_unit.append(known.setdefault(key, len(known)))
    units = tuple(of_unit.index(kind) for kind in range(len(known)))
    tagged = {unit for unit, s in zip(of_segment, model.segments, strict=True) if "LAYER" in dict(s.tags)}
    return Kinds(
        of_unit=tuple(of_unit),
        units=units,
        layers=tuple(unit in tagged for unit in units),
        shared=tuple((home, unit, numel) for (home, unit), numel in shared.items()),
    )


def thin_model(model: CapturedModel, kinds: Kinds) -> CapturedModel:
    """Return a model with the first unit of each kind."""
    of_segment = units_of(model).of_segment
    firsts = _firsts(of_segment)
    kept = [number for number, unit in enumerate(of_segment) if unit in set(kinds.units)]
    place = {number: new for new, number in enumerate(kept)}

    def moved(source: int) -> int:
        if source < 0:
            return source
        unit = of_segment[source]
        return place[firsts[kinds.units[kinds.of_unit[unit]]] + source - firsts[unit]]

    segments = tuple(
        replace(
            model.segments[number],
            inputs=tuple((moved(source), output) for source, output in model.segments[number].inputs),
            tags=_renumbered(model.segments[number], kinds.units.index(of_segment[number])),
        )
        for number in kept
    )
    names = {name for segment in segments for name in segment.parameters}
    parameters = tuple(p for p in model.parameters if p.name in names)
    return replace(model, segments=segments, parameters=parameters)


def unit_numels(model: CapturedModel, kinds: Kinds) -> Sequence[int]:
    """Return the trained elements of each unit, whole: those of shared parameters in each."""
    of_segment = units_of(model).of_segment
    names: dict[int, set[str]] = {unit: set() for unit in range(len(kinds.of_unit))}
    for segment, unit in zip(model.segments, of_segment, strict=True):
        names[unit].update(segment.parameters)
    numel: Mapping[str, int] = model.trained_numel
    return [sum(numel.get(name, 0) for name in names[unit]) for unit in sorted(names)]


def _renumbered(segment: CapturedSegment, unit: int) -> tuple[tuple[str, int], ...]:
    """Return its tags, with the unit that it is of in a thin model."""
    return tuple((name, unit if name == "PP" else index) for name, index in segment.tags)


def _firsts(of_segment: Sequence[int]) -> list[int]:
    """Return the first segment of every unit."""
    return [n for n, unit in enumerate(of_segment) if n == 0 or of_segment[n - 1] != unit]


def _signature(model: CapturedModel, number: int, *, first: int, shapes: Mapping[str, object]) -> Hashable:
    segment = model.segments[number]
    return (
        replace(segment, name="", tags=(), parameters=(), inputs=(), tensor_layout=(), tensor_refused=()),
        len(segment.tensor_refused),
        tuple(name for name, _ in segment.tags),
        tuple(shapes.get(name) for name in segment.parameters),
        tuple(layout for _, layout in segment.tensor_layout),
        tuple(_origin(model, source, output, first=first) for source, output in segment.inputs),
    )


def _origin(model: CapturedModel, source: int, output: int, *, first: int) -> Hashable:
    if source < 0:
        return ("model", source, output)
    if source >= first:
        return ("unit", source - first, output)
    return ("outside", model.segments[source].outputs[output])

"""How many experts a region has, told from its kernels or from its parameters; names tell it for a loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import takewhile

from cost_models.ops import OpKind
from piper.graph.captured import CapturedModel, CapturedSegment

_STACKED_DIMS = 3
"""Dimensions of the weights of several experts in one parameter: [experts, in, out]."""

_Shapes = Mapping[str, tuple[int, ...]]


def count_experts(model: CapturedModel, regions: Collection[int]) -> dict[int, int]:
    """Return the experts of those regions where something tells.

    They are the groups of a grouped matmul, the first dimension of stacked weights, or the modules of a list
    that a loop runs: each in a region of its own, or all (experts.0.up, experts.1.up, ...) in one.
    """
    segments = {number: model.segments[number] for number in regions}
    found = {number: _groups(segment) for number, segment in segments.items()}
    others = {n: segment for n, segment in segments.items() if not found[n] and segment.parameters}
    if others:
        shapes = {p.name: p.shape for p in model.parameters}
        lists = Counter(_list_of(segment) for segment in others.values())
        for number, segment in others.items():
            alone = lists[_list_of(segment)] if _owner(segment).rpartition(".")[2].isdecimal() else 1
            found[number] = _stacked(segment, shapes) or (alone if alone > 1 else _inside(segment, shapes))
    return {number: count for number, count in found.items() if count}


def _groups(segment: CapturedSegment) -> int:
    kernels = segment.forward.operations
    return next((kernel.shape[0] for kernel in kernels if kernel.kind is OpKind.GROUPED_MATMUL), 0)


def _stacked(segment: CapturedSegment, shapes: _Shapes) -> int:
    sizes = (shapes[name] for name in segment.parameters)
    return next((size[0] for size in sizes if len(size) == _STACKED_DIMS), 0)


def _inside(segment: CapturedSegment, shapes: _Shapes) -> int:
    """Return the members of the list that the region owns: numbered from 0, and all alike."""
    members: dict[str, set[tuple[str, tuple[int, ...]]]] = {}
    for name in segment.parameters:
        index, _, rest = name.removeprefix(f"{_owner(segment)}.").partition(".")
        members.setdefault(index, set()).add((rest, shapes[name]))
    alike = len({frozenset(member) for member in members.values()}) == 1
    numbered = members.keys() == {str(index) for index in range(len(members))}
    return len(members) if alike and numbered and len(members) > 1 else 0


def _list_of(segment: CapturedSegment) -> tuple[str, tuple[tuple[str, int], ...]]:
    """Return what regions share that run one member each of a list: its name, and their scope."""
    return _owner(segment).rpartition(".")[0], tuple(tag for tag in segment.tags if tag[0] != "EP")


def _owner(segment: CapturedSegment) -> str:
    """Return the name of the innermost module that has all parameters of a region."""
    names = [name.split(".")[:-1] for name in segment.parameters]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*names, strict=False))
    return ".".join(parts[0] for parts in shared)

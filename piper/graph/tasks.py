"""Rows of filters -> tasks of one pipeline rank: what the slots of an `order` mean in a graph.

[Note: slots]
A slot is a list of filters. A filter means every task that it matches: whole stages, or parts of stages
where it matches some of their segments only. No other task may lie on a path between two of them. Several
tasks of one filter follow each other, microbatch by microbatch along the data; the tasks of different
filters of a slot may overlap, first with first.

[Note: split backward]
A filter with PASS BI or BW splits the backward of the stages and microbatches that it means. Each of them
needs BI and, not earlier, BW in the same row, and no B; the others keep B.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, zip_longest

from piper.errors import StrategyError
from piper.graph.directive import require_tags
from piper.graph.filters import Filter
from piper.graph.graph import Graph
from piper.graph.parts import Parts, Place
from simulator.plan import NONE, TaskKind, TaskName

Slot = tuple[TaskName, ...]
Border = tuple[TaskKind, int]
_HALVES = frozenset({"BI", "BW"})
_LETTERS = ("F", "B", "BI", "BW")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What the filters of one pipeline rank mean.

    Args:
        slots: tasks that may overlap, slot after slot.
        borders: where they divide stages (`Graph.row_borders`).
    """

    slots: tuple[Slot, ...]
    borders: frozenset[Border]


def row_of_filters(
    graph: Graph, slots: Sequence[Sequence[Filter]], *, where: str, dimension: str = "MB"
) -> Row:
    """Return the tasks of one row of filters.

    Raises: StrategyError for a filter that matches nothing, or what is not convex; for tasks of several
        pipeline ranks; for a task that stands twice; for halves without each other.
    """
    filters = [which for slot in slots for which in slot]
    for which in filters:
        require_tags(graph, which, where=where, field="order.filters", dimensions=(dimension,))
    matches = _Matches(graph=graph, dimension=dimension)
    borders = frozenset(border for which in filters for border in matches.borders(which))
    divided = replace(graph, row_borders=tuple(sorted({*graph.row_borders, *borders})))
    reading = _Reading(
        matches=matches,
        parts=Parts(graph=divided),
        halved=frozenset(
            key
            for which in filters
            if which.passes is not None and which.passes & _HALVES
            for key in matches.keys(which)
        ),
        where=where,
    )
    row: list[Slot] = []
    for slot in slots:
        meant = [reading.tasks(which) for which in slot]
        row += [
            tuple(t for tasks in together for t in tasks) for together in zip_longest(*meant, fillvalue=())
        ]
    _check_home(graph, row, where=where)
    _check_once(reading.parts, row, where=where)
    _check_halves(row, where=where)
    return Row(slots=tuple(part for slot in row for part in _halves_apart(slot)), borders=borders)


@dataclass(frozen=True, kw_only=True)
class _Matches:
    """Which segments filters mean in a pass, F or B.

    Args:
        graph: of single segments.
        dimension: the tag that names a microbatch.
    """

    graph: Graph
    dimension: str

    def segments(self, which: Filter, kind: TaskKind) -> dict[int, tuple[int, ...]]:
        """Return the segments that a filter means in one pass by stage, its letters of the pass apart."""
        tags = which.without(self.dimension)
        found = {
            stage: tuple(i for i, tagged in listed.items() if tags.matches_tags(tagged))
            for stage, listed in self._tags[kind].items()
        }
        return {stage: hits for stage, hits in found.items() if hits}

    def is_whole(self, kind: TaskKind, stage: int, hits: Sequence[int]) -> bool:
        """Return whether these segments are all of a stage."""
        return len(hits) == len(self._tags[kind][stage])

    def microbatches(self, which: Filter) -> list[int]:
        """Return the microbatches that a filter means."""
        index = which.condition(self.dimension)
        everyone = range(len(self.graph.micro_batch_sizes))
        return [m for m in everyone if index is None or index.holds({self.dimension: m})]

    def keys(self, which: Filter) -> list[tuple[int, int]]:
        """Return (stage, microbatch) of the backwards that a filter means, its letters of the pass apart."""
        stages = self.segments(which, TaskKind.B)
        return [(stage, m) for stage in stages for m in self.microbatches(which)]

    def borders(self, which: Filter) -> Iterator[Border]:
        """Yield where a filter divides stages."""
        wanted = which.passes or frozenset(_LETTERS)
        kinds = {TaskKind.F: {"F"}, TaskKind.B: {"B", *_HALVES}, TaskKind.BW: {"BW"}}
        for kind, letters in kinds.items():
            listed = TaskKind.F if kind is TaskKind.F else TaskKind.B
            for stage, hits in self.segments(which, listed).items() if letters & wanted else ():
                inside = set(hits)
                for before, i in pairwise(self._tags[listed][stage]):
                    if (before in inside) is not (i in inside):
                        yield kind, i

    @cached_property
    def _tags(self) -> dict[TaskKind, dict[int, dict[int, Mapping[str, int]]]]:
        """By pass, stage and segment: its tags."""
        found: dict[TaskKind, dict[int, dict[int, Mapping[str, int]]]] = {TaskKind.F: {}, TaskKind.B: {}}
        for node in self.graph.nodes:
            if node.kind in found:
                found[node.kind].setdefault(node.stage, {})[node.first_segment] = dict(node.tags)
        return {kind: dict(sorted(stages.items())) for kind, stages in found.items()}


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """What the filters of one row mean.

    Args:
        matches: which segments they match.
        parts: of stages, as the row divides them.
        halved: (stage, microbatch) of the backwards that it splits.
        where: file and line.
    """

    matches: _Matches
    parts: Parts
    halved: frozenset[tuple[int, int]]
    where: str

    def tasks(self, which: Filter) -> list[Slot]:
        """Return the tasks that one filter means, in the order in which they run; each as its parts."""
        wanted = which.passes or frozenset(_LETTERS)
        found: list[Slot] = []
        for kind in (TaskKind.F, TaskKind.B):
            for stage, hits in self.matches.segments(which, kind).items():
                for microbatch in self.matches.microbatches(which):
                    halves = kind is TaskKind.B and (stage, microbatch) in self.halved
                    letters = ("BI", "BW") if halves else (kind.name,)
                    names = [
                        TaskName(kind=TaskKind[one], stage=stage, microbatch=microbatch)
                        for one in letters
                        if one in wanted
                    ]
                    found += [self._named(name, kind, hits) for name in names]
        if not found:
            raise self._nothing(which)
        if len(found) > 1 or len(found[0]) > 1:
            self._check_convex(found, which)
        return sorted(found, key=lambda t: (t[0].microbatch, self._depth(t), t[0].kind is TaskKind.BW))

    def _named(self, name: TaskName, kind: TaskKind, hits: Sequence[int]) -> Slot:
        """Return a task as the parts that segments are, along the data."""
        if self.matches.is_whole(kind, name.stage, hits):
            return (name,)
        listed = [part for part in self.parts.of(name.kind, name.stage) if part in hits]
        return tuple(replace(name, part=part) for part in (listed if kind is TaskKind.F else listed[::-1]))

    def _depth(self, task: Slot) -> int:
        return min(self._depths.get(place, 0) for place in self._places(task))

    def _places(self, task: Slot) -> Iterator[Place]:
        """Yield the parts of a task, those of BW as those of B."""
        for name in task:
            whole = replace(name, kind=TaskKind.B) if name.kind is TaskKind.BW else name
            yield from self.parts.of_task(whole)

    def _nothing(self, which: Filter) -> StrategyError:
        graph = self.matches.graph
        stages, microbatches = graph.num_stages, len(graph.micro_batch_sizes)
        rule, fix = (
            "matches no task of this strategy",
            f"there are {stages} stages and {microbatches} microbatches",
        )
        if which.passes == frozenset({"B"}) and self.halved:
            rule, fix = (
                "is split into BI and BW by this row", "name B, or BI and BW, of a stage and microbatch",
            )  # fmt: skip
        return StrategyError(where=self.where, field="order.filters", value=which.source, rule=rule, fix=fix)

    def _check_convex(self, found: Sequence[Slot], which: Filter) -> None:
        """Raise when a task outside lies on a path between two tasks of one microbatch."""
        places: dict[int, set[Place]] = {}
        for task in found:
            places.setdefault(task[0].microbatch, set()).update(self._places(task))
        for microbatch, inside in places.items():
            seen: dict[Place, Place] = {}
            front = [(n, n) for p in sorted(inside) for n in self._followers(p) if n not in inside]
            while front:
                place, exit_ = front.pop()
                if place in inside:
                    between = self.parts.name(exit_, microbatch).code
                    raise StrategyError(
                        where=self.where, field="order.filters", value=which.source,
                        rule=f"is not convex: {between} must run between its tasks",
                        fix="name these tasks in slots of their own",
                    )  # fmt: skip
                if place not in seen:
                    seen[place] = exit_
                    front += [(n, exit_) for n in self._followers(place)]

    def _followers(self, place: Place) -> list[Place]:
        return [other for other in self.parts.followers.get(place, ()) if other[0] is not TaskKind.BW]

    @cached_property
    def _depths(self) -> dict[Place, int]:
        """Return the longest path to each part: tasks of one microbatch in the order of their data."""
        depth = dict.fromkeys(self.parts.needs, 0)
        incoming = {place: len(before) for place, before in self.parts.needs.items()}
        ready = [place for place in depth if not incoming[place]]
        while ready:
            place = ready.pop()
            for target in self.parts.followers[place]:
                depth[target] = max(depth[target], depth[place] + 1)
                incoming[target] -= 1
                if not incoming[target]:
                    ready.append(target)
        return depth


def _check_home(graph: Graph, row: Iterable[Slot], *, where: str) -> None:
    homes: dict[int, TaskName] = {}
    for task in (task for slot in row for task in slot):
        homes.setdefault(graph.pipeline_rank_of_stage[task.stage], task)
    if len(homes) > 1:
        shown = " and ".join(f"{task.code} of rank {rank}" for rank, task in sorted(homes.items())[:2])
        raise StrategyError(
            where=where, field="order.filters", value=f"pipeline ranks {sorted(homes)}",
            rule=f"crosses device placement: {shown}", fix="write one order directive per pipeline rank",
        )  # fmt: skip


def _check_once(parts: Parts, row: Iterable[Slot], *, where: str) -> None:
    counts = Counter(
        parts.name(place, task.microbatch, kind=task.kind)
        for slot in row
        for task in slot
        for place in parts.of_task(task)
    )
    twice = next((task for task, count in counts.items() if count > 1), None)
    if twice is not None:
        raise StrategyError(
            where=where, field="order.filters", value=twice.code, rule=f"stands {counts[twice]} times",
            fix="keep one of them",
        )  # fmt: skip


def _check_halves(row: Iterable[Slot], *, where: str) -> None:
    """Raise for halves without each other, or in the wrong order; parts are looked at by `CheckOrder`."""
    position = {task: i for i, task in enumerate(task for slot in row for task in slot)}
    halved = {(task.kind, task.stage, task.microbatch) for task in position}
    for task, place in position.items():
        if task.kind not in {TaskKind.BI, TaskKind.BW}:
            continue
        inputs = TaskName(kind=TaskKind.BI, stage=task.stage, microbatch=task.microbatch)
        weights = TaskName(kind=TaskKind.BW, stage=task.stage, microbatch=task.microbatch)
        other = weights if task.kind is TaskKind.BI else inputs
        if (other.kind, other.stage, other.microbatch) not in halved:
            raise StrategyError(
                where=where, field="order.filters", value=task.code,
                rule=f"needs one {other.code} in the same order", fix=f"add {other.code}, or name B instead",
            )  # fmt: skip
        if task == weights and place < position.get(inputs, NONE):
            raise StrategyError(
                where=where, field="order.filters", value=task.code, rule=f"stands before its {inputs.code}",
                fix=f"list {inputs.code} first",
            )  # fmt: skip


def _halves_apart(slot: Slot) -> list[Slot]:
    """Return a slot without the BW whose BI is in it, and that BW right behind it."""
    late = [t for t in slot if t.kind is TaskKind.BW and replace(t, kind=TaskKind.BI) in slot]
    first = tuple(t for t in slot if t not in late)
    return [part for part in (first, tuple(late)) if part]

"""Parts of stages: where the rows of an order divide passes, and which part needs which others.

[Note: parts]
A row may order runs of segments instead of whole stages. `Graph.row_borders` says where that divides a pass
of a stage: into the same parts for all its microbatches, of which a row names some one by one and others
all at once, by the stage. A part is known by its first segment, as its tasks are (`Task.part`); B and BI
have the same parts, BW may have fewer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

from piper.graph.cut import units_of
from piper.graph.graph import Graph
from simulator.plan import NONE, TaskKind, TaskName

F, B, BW = TaskKind.F, TaskKind.B, TaskKind.BW

Place = tuple[TaskKind, int, int]
"""F, B (for BI too) or BW; stage; first segment of a part."""

_PASS = {F: F, B: B, TaskKind.BI: B, BW: BW}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of all stages.

    Args:
        graph: cut into stages, with the borders of its rows.
    """

    graph: Graph

    def of(self, kind: TaskKind, stage: int) -> tuple[int, ...]:
        """Return the first segments of the parts of a pass, rising; none where a stage has no such pass."""
        return self._parts.get((_PASS[kind], stage), ())

    def of_task(self, task: TaskName) -> tuple[Place, ...]:
        """Return the parts that a task of a row covers: the one that it names, or all of its pass."""
        found = self.of(task.kind, task.stage) if task.part == NONE else (task.part,)
        return tuple((_PASS[task.kind], task.stage, part) for part in found)

    def name(self, place: Place, microbatch: int, *, kind: TaskKind | None = None) -> TaskName:
        """Return the task of a part, or of an undivided stage; `kind`: BI instead of B."""
        divided = len(self.of(*place[:2])) > 1
        return TaskName(
            kind=kind or place[0], stage=place[1], microbatch=microbatch, part=place[2] if divided else NONE
        )

    def share(self, task: TaskName) -> Fraction | int:
        """Return the part of the segments of its stage that a task covers."""
        if task.part == NONE:
            return 1
        kind = _PASS[task.kind]
        found = [place for place in self._home.values() if place[:2] == (kind, task.stage)]
        return Fraction(found.count((kind, task.stage, task.part)), len(found))

    @cached_property
    def needs(self) -> dict[Place, tuple[Place, ...]]:
        """Return, by part, the parts whose results it needs, for one microbatch.

        Besides what the data say: parts of a unit that is recomputed run backward from its end, as it is
        made again as a whole.
        """
        found: dict[Place, dict[Place, None]] = {
            (kind, stage, part): {} for (kind, stage), parts in self._parts.items() for part in parts
        }
        for source, target in self._flows():
            if source != target:
                found[target][source] = None
        return {place: tuple(before) for place, before in found.items()}

    @cached_property
    def followers(self) -> dict[Place, tuple[Place, ...]]:
        """Return, by part, the parts that need its results, rising."""
        found: dict[Place, list[Place]] = {place: [] for place in self.needs}
        for place, before in self.needs.items():
            for other in before:
                found[other].append(place)
        return {place: tuple(sorted(after)) for place, after in found.items()}

    def _flows(self) -> Iterable[tuple[Place, Place]]:
        """Yield (giver, taker), segment by segment."""
        segments = self.graph.model.segments
        for i, segment in enumerate(segments):
            for source, output in segment.inputs:
                if source >= 0:
                    yield self._home[F, source], self._home[F, i]
                    if (B, i) in self._home and segments[source].outputs[output].requires_grad:
                        yield self._home[B, i], self._home[B, source]
            if (B, i) in self._home:
                yield self._home[F, i], self._home[B, i]
                yield self._home[B, i], self._home[BW, i]
        remade = {i for fact in self.graph.recomputations for i in fact.segments}
        units, stages = units_of(self.graph.model).of_segment, self.graph.stage_of_segment
        again = {(stages[i], units[i]) for i in remade}
        inside = [i for i in range(len(segments)) if (stages[i], units[i]) in again and (B, i) in self._home]
        for i, later in pairwise(inside):
            if (stages[i], units[i]) == (stages[later], units[later]):
                yield self._home[B, later], self._home[B, i]

    @cached_property
    def _home(self) -> dict[tuple[TaskKind, int], Place]:
        """(pass, segment) -> the part that has it."""
        borders = set(self.graph.row_borders)
        found: dict[tuple[TaskKind, int], Place] = {}
        for kind in (F, B, BW):
            place: Place | None = None
            for i, stage in enumerate(self.graph.stage_of_segment):
                if kind is not F and not any(o.requires_grad for o in self.graph.model.segments[i].outputs):
                    continue
                if place is None or place[1] != stage or (kind, i) in borders:
                    place = (kind, stage, i)
                found[kind, i] = place
        return found

    @cached_property
    def _parts(self) -> dict[tuple[TaskKind, int], tuple[int, ...]]:
        found: dict[tuple[TaskKind, int], dict[int, None]] = {}
        for kind, stage, part in self._home.values():
            found.setdefault((kind, stage), {})[part] = None
        return {key: tuple(parts) for key, parts in found.items()}

"""Where boundary tensors are on their way from segment to segment: on which side of which exchange. No torch.

[Note: sides of a border]
A tensor that crosses the border of a region lies otherwise behind it. On the side where it is made it is
known as (segment, output); behind an exchange at border b as (segment, output, b, 0); what an R task, or an
exchange that serves one, makes again as (segment, output, b, 1), with b = NONE where it is made. A gradient
takes the same way back: it is known by the border that it has not yet crossed. Where nothing turns a tensor
at a border in a pass, both sides are one.

[Note: beside]
The exchanges of an asynchronous region are dispatched before its computation and wait for nothing in it, so
that pieces may travel as they are made. Here a tensor travels as a whole: whoever needs it waits inside its
task.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from cost_models.errors import check_invariant
from simulator.plan import COLLECTIVE_KINDS, NONE, Plan, Region, Task, TaskKind

Value = tuple[int, ...]
"""(segment, output), or with border and 0 or 1 ([Note: sides of a border]); segment -1: a model input."""

_FORWARD = (TaskKind.F, TaskKind.R)
_ORDER = {"tp": 0, "ep": 1, "cp": 2}
"""Outermost first (`piper.passes.insert_exchanges`)."""


class Role(Enum):
    """What an exchange is for."""

    CROSS = 0  # it turns tensors at a border
    AGAIN = 1  # it gathers once more, for B, what a region took in F
    ROWS = 2  # ranks of tp agree on the rows of a softmax over cut features
    RING = 3  # keys and values go round


@dataclass(frozen=True, slots=True)
class Border:
    """One side of a region."""

    region: Region
    enters: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What a collective within a microbatch does.

    Args:
        role: see `Role`; `border` is NONE for ROWS and RING.
        border: number in `Borders.all`.
        segment: ROWS and RING: of the softmax, or of the attention.
    """

    role: Role
    border: int = NONE
    segment: int = NONE


def made_again(value: Value) -> Value:
    """Return the name of what an R task makes again."""
    return (value[0], value[1], value[2] if len(value) > 2 else NONE, 1)  # noqa: PLR2004


@dataclass(frozen=True, kw_only=True)
class Borders:
    """Look-ups about all regions of a plan."""

    plan: Plan

    @cached_property
    def all(self) -> tuple[Border, ...]:
        """Return all borders at which tensors are turned; a border's number is its position."""
        turning = (region for region in self.plan.cuts.regions if region.method != "ring")
        return tuple(Border(region, enters) for region in turning for enters in (True, False))

    def exchange(self, task: Task) -> Exchange:
        """Return what a collective of a microbatch does, told from its kind, phase and place."""
        axis = self.plan.groups[task.group].axis
        if task.kind is TaskKind.RING_SHIFT:
            return Exchange(role=Role.RING, segment=task.part)
        begins, ends = self._begins.get((axis, task.part)), self._ends.get((axis, task.part))
        inwards = {TaskKind.ALL_GATHER: _FORWARD, TaskKind.REDUCE_SCATTER: (TaskKind.B,)}.get(task.kind)
        if task.kind is TaskKind.ALL_REDUCE:
            inwards = (TaskKind.B,)
        if task.kind is TaskKind.ALL_TO_ALL or inwards is None:
            found = ends if begins is None else begins
            check_invariant(found is not None, f"no {axis} region at segment {task.part}")
            return Exchange(role=Role.CROSS, border=NONE if found is None else found)
        if pass_of(task) in inwards:
            check_invariant(begins is not None, f"no {axis} region begins at segment {task.part}")
            return Exchange(role=Role.CROSS, border=NONE if begins is None else begins)
        if ends is not None:
            return Exchange(role=Role.CROSS, border=ends)
        if task.kind is TaskKind.ALL_GATHER and begins is not None:
            return Exchange(role=Role.AGAIN, border=begins)
        return Exchange(role=Role.ROWS, segment=task.part)

    def path(self, producer: int, consumer: int) -> tuple[int, ...]:
        """Return the borders between two segments, in the order in which a tensor crosses them."""
        if producer < 0 or not self.all:
            return ()
        out, into = self._around.get(producer, ()), self._around.get(consumer, ())
        leaving = [self._number[region, False] for region in out[::-1] if region not in into]
        return (*leaving, *(self._number[region, True] for region in into if region not in out))

    def turns(self, border: int, value: Value, phase: TaskKind) -> bool:
        """Return whether an exchange turns a tensor (B: its gradient) at a border; R as F."""
        spec = self.plan.segments[value[0]].outputs[value[1]]
        if (border, TaskKind.B if phase is TaskKind.B else TaskKind.F) not in self._present:
            return False
        # With the rows of the experts their ends are exchanged.
        return spec.batch_dim is not None or (phase is not TaskKind.B and self.is_ends(border, value))

    def is_ends(self, border: int, value: Value) -> bool:
        """Return whether a value says where the rows of each expert of a region end, [experts] int32."""
        spec = self.plan.segments[value[0]].outputs[value[1]]
        of_experts = self.all[border].region.axis == "ep" and self.all[border].enters
        return of_experts and spec.batch_dim is None and len(spec.shape) == 1 and not spec.requires_grad

    def taken(self, value: Value, consumer: int, *, phase: TaskKind) -> Value:
        """Return the name under which a segment takes a boundary tensor, or hands back its gradient."""
        return self.behind(value, self.path(value[0], consumer), phase=phase)

    def behind(self, value: Value, crossed: Iterable[int], *, phase: TaskKind) -> Value:
        """Return the name of a tensor behind some borders that it crosses in this order."""
        name = value
        for border in crossed:
            if self.turns(border, value, phase):
                name = (value[0], value[1], border, 0)
        return name

    def outside(self, value: Value, *, phase: TaskKind) -> Value:
        """Return the name of a boundary tensor between stages."""
        leaving = [self._number[region, False] for region in self._around.get(value[0], ())[::-1]]
        return self.behind(value, leaving, phase=phase)

    def crossing(self, border: int, *, phase: TaskKind) -> dict[Value, tuple[Value, list[int]]]:
        """Return what an exchange turns: (segment, output) -> (its name before the border, its takers).

        "Before" as the forward crosses it, for B too.
        """
        return self._crossings.get((border, TaskKind.B if phase is TaskKind.B else TaskKind.F), {})

    def is_beside(self, value: Value) -> bool:
        """Return whether the exchange that brings a tensor runs beside what takes it [Note: beside]."""
        return len(value) > 2 and value[2] != NONE and self.all[value[2]].region.asynchronous  # noqa: PLR2004

    def leaves_beside(self, value: Value) -> bool:
        """Return whether a segment makes a tensor in a region whose exchanges run beside it."""
        return any(region.asynchronous for region in self._around.get(value[0], ()))

    def prefix(self, value: Value, border: int) -> tuple[int, ...]:
        """Return the borders that a tensor has crossed behind `border`, that one too."""
        for consumer, segment in enumerate(self.plan.segments):
            path = self.path(value[0], consumer) if value in segment.inputs else ()
            if border in path:
                return path[: path.index(border) + 1]
        check_invariant(False, f"nothing takes {value} over border {border}")
        return ()

    @cached_property
    def _crossings(self) -> dict[tuple[int, TaskKind], dict[Value, tuple[Value, list[int]]]]:
        found: dict[tuple[int, TaskKind], dict[Value, tuple[Value, list[int]]]] = {}
        for consumer, segment in enumerate(self.plan.segments):
            for value in (value for value in segment.inputs if value[0] >= 0):
                path = self.path(value[0], consumer)
                for phase in (TaskKind.F, TaskKind.B):
                    if phase is TaskKind.B and not self._has_gradient(value):
                        continue
                    for position, border in enumerate(path):
                        if self.turns(border, value, phase):
                            before = self.behind(value, path[:position], phase=phase)
                            entry = found.setdefault((border, phase), {}).setdefault(value, (before, []))
                            entry[1].append(consumer)
        return found

    def _has_gradient(self, value: Value) -> bool:
        return self.plan.segments[value[0]].outputs[value[1]].requires_grad

    @cached_property
    def _number(self) -> dict[tuple[Region, bool], int]:
        return {(border.region, border.enters): number for number, border in enumerate(self.all)}

    @cached_property
    def _begins(self) -> dict[tuple[str, int], int]:
        return {(b.region.axis, b.region.first): i for i, b in enumerate(self.all) if b.enters}

    @cached_property
    def _ends(self) -> dict[tuple[str, int], int]:
        return {(b.region.axis, b.region.last + 1): i for i, b in enumerate(self.all) if not b.enters}

    @cached_property
    def _around(self) -> dict[int, tuple[Region, ...]]:
        """Segment -> the regions around it, outermost first."""
        found: dict[int, list[Region]] = {}
        for region in sorted({b.region for b in self.all}, key=lambda region: _ORDER[region.axis]):
            for segment in range(region.first, region.last + 1):
                found.setdefault(segment, []).append(region)
        return {segment: tuple(regions) for segment, regions in found.items()}

    @cached_property
    def _present(self) -> frozenset[tuple[int, TaskKind]]:
        """Return the (border, F or B) at which the plan has an exchange."""
        found: set[tuple[int, TaskKind]] = set()
        for device in self.plan.device_plans:
            for task in _one_microbatch(device.tasks):
                exchange = self.exchange(task)
                if exchange.role is Role.CROSS:
                    passed = TaskKind.B if pass_of(task) is TaskKind.B else TaskKind.F
                    found.add((exchange.border, passed))
        return frozenset(found)


def pass_of(task: Task) -> TaskKind:
    """Return the pass that an exchange serves: F, R, or B for every kind of backward."""
    phase = TaskKind(task.phase)
    return phase if phase in _FORWARD else TaskKind.B


def is_exchange(task: Task) -> bool:
    """Return whether a task is a collective within a microbatch that serves no bucket."""
    return task.kind in COLLECTIVE_KINDS and task.phase != NONE and task.bucket == NONE


def _one_microbatch(tasks: Iterable[Task]) -> Iterable[Task]:
    return (task for task in tasks if task.microbatch == 0 and is_exchange(task))

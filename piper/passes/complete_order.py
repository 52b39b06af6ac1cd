"""Complete an order that names only some ranks or some tasks: list scheduling that keeps what is stated.

[Note: completed orders]
What the rows list on a rank stays in its order; what they do not list runs where its stage lives, as
early as the data allow, with F = 1 and B = 2 (two matrix products for one; parts of stages by their
segments): a backward before a forward,
then the lower microbatch, then the stage nearer to the end of its pass. A forward that no row lists waits
while its stage holds as many microbatches as there are stages from it to the last one, so that ranks with
one stage each get 1F1B. If nothing else can run, because a row wants more forwards first, the first
forward that waits runs nevertheless.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from heapq import heappop, heappush

import numpy as np

from piper.errors import StrategyError
from piper.graph.graph import Graph, Rows
from piper.graph.parts import Parts
from simulator.plan import NONE, TaskKind, TaskName
from simulator.plan.checks.shortest_cycle import Digraph

_TIME = {TaskKind.F: 1, TaskKind.B: 2, TaskKind.BI: 1, TaskKind.BW: 1}
_BACKWARD = (TaskKind.B, TaskKind.BI)
_HALVES = (TaskKind.BI, TaskKind.BW)
_KINDS = {TaskKind.F: (TaskKind.F,), TaskKind.B: _BACKWARD, TaskKind.BW: (TaskKind.BW,)}
"""Of a pass: the tasks that run it."""

Slot = tuple[TaskName, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteOrder:
    """Add the tasks that the rows of a hand-written order leave out; the rows of a named schedule are whole.

    rewrite: rows F0 ... B0, of two microbatches  ->  rows F0 F1 B0 B1
    """

    def apply(self, graph: Graph) -> Graph:
        """Return the graph with complete rows; raises StrategyError where the rows contradict the data."""
        if graph.rows and graph.schedule != "custom":
            return graph
        parts = Parts(graph=graph)
        missing = _missing(parts)
        if not any(missing):
            return graph
        rows = graph.rows or ((),) * graph.num_pipeline_ranks
        work = _Work.of(parts, rows, missing)
        _require_no_cycle(work, graph)
        lines = graph.row_lines or ("",) * len(rows)
        return replace(graph, rows=_list_schedule(work), row_lines=lines, schedule="custom")


def _missing(parts: Parts) -> tuple[tuple[TaskName, ...], ...]:
    """Return, by pipeline rank, F and B of its stages that no row has, whole, in halves or in parts."""
    graph = parts.graph
    listed: dict[tuple[TaskKind, int, int], set[int]] = {}
    for task in (task for row in graph.rows for slot in row for task in slot):
        listed.setdefault((task.kind, task.stage, task.microbatch), set()).add(task.part)

    def lacking(kind: TaskKind, stage: int, microbatch: int) -> Iterator[TaskName]:
        if kind is TaskKind.B and any((half, stage, microbatch) in listed for half in _HALVES):
            for half in _HALVES:
                yield from lacking(half, stage, microbatch)
            return
        whole = TaskName(kind=kind, stage=stage, microbatch=microbatch)
        named = listed.get((kind, stage, microbatch))
        if named is None:
            yield whole
        elif NONE not in named:
            yield from (replace(whole, part=i) for i in parts.of(kind, stage) if i not in named)

    return tuple(
        tuple(
            task
            for stage, home in sorted(graph.pipeline_rank_of_stage.items())
            for microbatch in range(len(graph.micro_batch_sizes))
            for kind in (TaskKind.F, TaskKind.B)
            if home == rank and parts.of(kind, stage)
            for task in lacking(kind, stage, microbatch)
        )
        for rank in range(graph.num_pipeline_ranks)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """All slots, numbered: those of the rows, then one for each missing task.

    Args:
        parts: of stages.
        slots: their tasks.
        rank: where each runs.
        listed: how many of them stand in rows: the first ones.
        needs: what has to end before each starts: data, and the slot before it in its row.
        depth: stages from each stage to the last one, itself included.
    """

    parts: Parts
    slots: tuple[Slot, ...]
    rank: tuple[int, ...]
    listed: int
    needs: tuple[tuple[int, ...], ...]
    depth: Mapping[int, int]

    @staticmethod
    def of(parts: Parts, rows: Rows, missing: Sequence[Sequence[TaskName]]) -> _Work:
        slots = [slot for row in rows for slot in row]
        rank = [number for number, row in enumerate(rows) for _ in row]
        listed = len(slots)
        slots += [(task,) for tasks in missing for task in tasks]
        rank += [number for number, tasks in enumerate(missing) for _ in tasks]
        slot_of = {
            parts.name(place, task.microbatch, kind=task.kind): number
            for number, slot in enumerate(slots)
            for task in slot
            for place in parts.of_task(task)
        }
        needs = []
        for number, slot in enumerate(slots):
            found = {need for task in slot for need in _needs(task, parts, slot_of)} - {number}
            if 0 < number < listed and rank[number - 1] == rank[number]:
                found.add(number - 1)
            needs.append(tuple(sorted(found)))
        return _Work(
            parts=parts,
            slots=tuple(slots),
            rank=tuple(rank),
            listed=listed,
            needs=tuple(needs),
            depth=_depths(parts),
        )

    def time(self, number: int) -> Fraction | int:
        """Return how long a slot takes: whole numbers where its stages are not divided."""
        return sum(_TIME[task.kind] * self.parts.share(task) for task in self.slots[number])

    def begins(self, task: TaskName) -> bool:
        """Return whether a task has the first segment of its stage: one part of a pass has."""
        return task.part == NONE or task.part == self.parts.of(task.kind, task.stage)[0]


def _depths(parts: Parts) -> dict[int, int]:
    """Return how many stages a forward passes from each stage to the end, on the longest way."""
    stages = sorted({stage for kind, stage, _ in parts.needs if kind is TaskKind.F}, reverse=True)
    depth = dict.fromkeys(stages, 1)
    for stage in stages:
        for part in parts.of(TaskKind.F, stage):
            for kind, earlier, _ in parts.needs[TaskKind.F, stage, part]:
                if kind is TaskKind.F and earlier != stage:
                    depth[earlier] = max(depth[earlier], depth[stage] + 1)
    return depth


def _needs(task: TaskName, parts: Parts, slot_of: Mapping[TaskName, int]) -> Iterator[int]:
    """Yield the slots whose data a task needs; of a backward in halves the first one."""
    for needed in (needed for place in parts.of_task(task) for needed in parts.needs[place]):
        for kind in _KINDS[needed[0]]:
            number = slot_of.get(parts.name(needed, task.microbatch, kind=kind))
            if number is not None:
                yield number


def _require_no_cycle(work: _Work, graph: Graph) -> None:
    pairs = [(need, number) for number, needs in enumerate(work.needs) for need in needs]
    sources, targets = (np.array(column, dtype=np.int64) for column in zip(*pairs, strict=True))
    digraph = Digraph(count=len(work.slots), sources=sources, targets=targets)
    if not len(digraph.unsorted()):
        return
    cycle = digraph.shortest_cycle()[::-1]
    first = cycle.index(min(cycle))
    ring = [*cycle[first:], *cycle[:first]]
    chain = " -> ".join(_shown(work, number) for number in (*ring, ring[0]))
    line = graph.row_lines[work.rank[ring[0]]] if graph.row_lines else ""
    raise StrategyError(
        where=line or f"order of pipeline rank {work.rank[ring[0]]}",
        field="order.filters",
        value=_shown(work, ring[0]),
        rule=f"cannot be completed: tasks wait for each other: {chain} (each waits for the next)",
        fix="change the order of two of them, or leave one out: it finds its place",
    )


def _shown(work: _Work, number: int) -> str:
    return f"{' and '.join(task.code for task in work.slots[number])} of rank {work.rank[number]}"


@dataclass(slots=True)
class _State:
    """What has run: slots left to wait for, who waits for them, and microbatches that stages hold."""

    left: list[int]
    after: Mapping[int, Sequence[int]]
    ready: list[list[int]]
    held: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))


def _list_schedule(work: _Work) -> Rows:
    """Return complete rows; see [Note: completed orders]."""
    after: dict[int, list[int]] = {}
    for number, needs in enumerate(work.needs):
        for need in needs:
            after.setdefault(need, []).append(number)
    num_ranks = max(work.rank) + 1
    state = _State(
        left=[len(needs) for needs in work.needs], after=after, ready=[[] for _ in range(num_ranks)]
    )
    for number in (n for n, left in enumerate(state.left) if not left):
        state.ready[work.rank[number]].append(number)
    rows: list[list[Slot]] = [[] for _ in range(num_ranks)]
    running: list[tuple[Fraction | int, int]] = []
    idle = dict.fromkeys(range(num_ranks))
    now: Fraction | int = 0
    while any(state.ready) or running:
        chosen = [slot for rank in idle if (slot := _choice(work, state, rank)) is not None]
        if not chosen and not running:
            waiting = (number for ready in state.ready for number in ready)
            chosen = [min(waiting, key=lambda number: _key(work, number))]
        for start in chosen:
            rank = work.rank[start]
            rows[rank].append(work.slots[start])
            state.ready[rank].remove(start)
            del idle[rank]
            _count(work, state, start)
            heappush(running, (now + work.time(start), start))
        now = running[0][0]
        while running and running[0][0] == now:
            _, number = heappop(running)
            idle[work.rank[number]] = None
            for follower in state.after.get(number, ()):
                state.left[follower] -= 1
                if not state.left[follower]:
                    state.ready[work.rank[follower]].append(follower)
    return tuple(tuple(row) for row in rows)


def _choice(work: _Work, state: _State, rank: int) -> int | None:
    """Return the slot that an idle rank runs now, or None."""
    return min(
        (number for number in state.ready[rank] if _may_start(work, state, number)),
        key=lambda number: _key(work, number),
        default=None,
    )


def _may_start(work: _Work, state: _State, number: int) -> bool:
    task = work.slots[number][0]
    if number < work.listed or task.kind is not TaskKind.F or not work.begins(task):
        return True
    return state.held[task.stage] < work.depth[task.stage]


def _key(work: _Work, number: int) -> tuple[bool, int, int, int]:
    task = work.slots[number][0]
    forward = task.kind is TaskKind.F
    return forward, task.microbatch, -task.stage if forward else task.stage, number


def _count(work: _Work, state: _State, number: int) -> None:
    for task in filter(work.begins, work.slots[number]):
        state.held[task.stage] += {TaskKind.F: 1, TaskKind.BI: 0}.get(task.kind, -1)

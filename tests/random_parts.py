"""Rows that order parts of stages: any division of passes, parts in any order in which the data allow them.

All that is drawn is legal, so that a violation in the plan, or a hang, is a fault of ours.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from piper.graph import Graph
from piper.graph.graph import Rows
from piper.graph.parts import Parts, Place
from simulator.plan import TaskKind, TaskName

Slots = list[list[TaskName]]


def with_random_parts(graph: Graph, choose: random.Random, *, halves: float | None = None) -> Graph:
    """Return a graph before the passes with rows of its own, which divide stages and order their parts.

    `halves`: share of backwards that are split into BI and BW (None: any).
    """
    graph = replace(graph, row_borders=tuple(sorted(_borders(graph, choose))), row_lines=())
    return replace(graph, rows=random_rows(graph, choose, halves=halves), schedule="custom")


def _borders(graph: Graph, choose: random.Random) -> set[tuple[TaskKind, int]]:
    found: set[tuple[TaskKind, int]] = set()
    often = choose.choice([0.1, 0.3, 0.6])
    stages = graph.stage_of_segment
    for i in range(1, len(stages)):
        if stages[i] == stages[i - 1]:
            kinds = [kind for kind in (TaskKind.F, TaskKind.B, TaskKind.BW) if choose.random() < often]
            found |= {(kind, i) for kind in kinds}
            found |= {(TaskKind.B, i) for kind in kinds if kind is TaskKind.BW}
    return found


def random_rows(graph: Graph, choose: random.Random, *, halves: float | None = None) -> Rows:
    """Return complete rows in which passes stand whole, in halves and in parts, some in one slot."""
    share = choose.choice([0.0, 0.5, 1.0]) if halves is None else halves
    work = _Work(parts=Parts(graph=graph), tasks=tuple(_tasks(graph, choose, halves=share)))
    rows: list[Slots] = [[] for _ in range(graph.num_pipeline_ranks)]
    waiting = {task: set(work.needs[task]) for task in work.tasks}
    while waiting:
        task = choose.choice([task for task, needs in waiting.items() if not needs])
        del waiting[task]
        for needs in waiting.values():
            needs.discard(task)
        rows[graph.pipeline_rank_of_stage[task.stage]].append([task])
    joined = [_with_overlap(row, choose) for row in rows]
    return tuple(tuple(map(tuple, row)) for row in (joined if work.can_run(joined) else rows))


def _tasks(graph: Graph, choose: random.Random, *, halves: float) -> Iterable[TaskName]:
    parts = Parts(graph=graph)
    for stage in range(graph.num_stages):
        for microbatch in range(len(graph.micro_batch_sizes)):
            kinds = [TaskKind.F]
            if parts.of(TaskKind.B, stage):
                split = choose.random() < halves
                kinds += [TaskKind.BI, TaskKind.BW] if split else [TaskKind.B]
            for kind in kinds:
                whole = TaskName(kind=kind, stage=stage, microbatch=microbatch)
                listed = parts.of(kind, stage)
                divided = len(listed) > 1 and choose.random() < 0.7
                yield from (replace(whole, part=part) for part in listed) if divided else (whole,)


@dataclass(frozen=True, kw_only=True)
class _Work:
    """All tasks of a step and what each needs."""

    parts: Parts
    tasks: tuple[TaskName, ...]

    @cached_property
    def needs(self) -> Mapping[TaskName, frozenset[TaskName]]:
        owner: dict[tuple[Place, int], TaskName] = {
            (place, task.microbatch): task for task in self.tasks for place in self.parts.of_task(task)
        }
        return {
            task: frozenset(
                owner[needed, task.microbatch]
                for place in self.parts.of_task(task)
                for needed in self.parts.needs[place]
            )
            - {task}
            for task in self.tasks
        }

    def can_run(self, rows: Sequence[Slots]) -> bool:
        """Return whether slots can run one after another, each starting when all its inputs are there."""
        done: set[TaskName] = set()
        place = [0] * len(rows)
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(rows):
                while place[rank] < len(row) and all(self.needs[t] <= done for t in row[place[rank]]):
                    done.update(row[place[rank]])
                    place[rank] += 1
                    moved = True
        return place == [len(row) for row in rows]


def _with_overlap(row: Slots, choose: random.Random) -> Slots:
    joined: Slots = []
    for slot in row:
        if joined and len(joined[-1]) < 3 and choose.random() < 0.2:
            joined[-1].extend(slot)
        else:
            joined.append(list(slot))
    return joined

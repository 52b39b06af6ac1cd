"""Check the order rows against the graph, so that emission can trust them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from piper.errors import StrategyError
from piper.graph.graph import Graph
from simulator.plan import TaskKind, TaskName


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOrder:
    """Raise unless each rank's row has every F, and every B or both its halves, of its stages once.

    Where stages have two homes, a microbatch has all its tasks at the first ones, or all at the second ones.

    rewrite: graph -> the same graph
    """

    def apply(self, graph: Graph) -> Graph:
        """Return the graph; raises StrategyError naming the rank and the task."""
        runs = _directions(graph)
        for rank, row in enumerate(graph.rows):
            listed = [(t.kind, t.stage, t.microbatch) for slot in row for t in slot]
            present = set(listed)
            wanted = dict.fromkeys(_tasks(graph, rank, present, runs=runs))
            for task in listed:
                if task not in wanted:
                    raise _error(rank, task, _unwanted(graph, rank, task))
            if len(present) != len(listed):
                twice = next(task for i, task in enumerate(listed) if task in listed[:i])
                raise _error(rank, twice, ("stands twice in the order", "keep one of them"))
            for task in wanted:
                if task not in present:
                    raise _error(rank, task, ("is missing from the order", "add it"))
            _check_halves(rank, listed)
        return graph


_Task = tuple[TaskKind, int, int]
"""Kind, stage, microbatch."""


def _directions(graph: Graph) -> dict[int, bool]:
    """Return, by microbatch, whether it runs at the second homes of stages: where its first stage runs."""
    first = {rank: i > 0 for i, rank in enumerate(graph.pipeline_ranks_of_stage[0])}
    return {
        task.microbatch: first[rank]
        for rank, row in enumerate(graph.rows)
        for slot in row
        for task in slot
        if task.kind is TaskKind.F and task.stage == 0 and rank in first
    }


def _tasks(graph: Graph, rank: int, present: set[_Task], *, runs: dict[int, bool]) -> Iterator[_Task]:
    """Yield what a row must have; a backward is split where the row has one of its halves."""
    backward = {n.stage for n in graph.nodes if n.kind is TaskKind.B}
    for stage in graph.stages_of_rank(rank):
        second = graph.pipeline_rank_of_stage[stage] != rank
        for microbatch in range(len(graph.micro_batch_sizes)):
            if runs.get(microbatch, False) is not second:
                continue
            yield TaskKind.F, stage, microbatch
            if stage in backward:
                halves = (TaskKind.BI, stage, microbatch), (TaskKind.BW, stage, microbatch)
                split = halves[0] in present or halves[1] in present
                yield from halves if split else ((TaskKind.B, stage, microbatch),)


def _unwanted(graph: Graph, rank: int, task: _Task) -> tuple[str, str]:
    """Return rule and fix for a task that a row must not have."""
    kind, stage, microbatch = task
    own = stage in graph.stages_of_rank(rank) and microbatch in range(len(graph.micro_batch_sizes))
    if own and kind is not TaskKind.B:
        return "runs its other stages in the other direction", "keep a microbatch in one direction"
    if own:
        return "stands beside its halves BI and BW", "keep B, or BI and BW"
    return "is not a task of this pipeline rank", "leave it out"


def _check_halves(rank: int, listed: Sequence[_Task]) -> None:
    seen: set[_Task] = set()
    for task in listed:
        seen.add(task)
        kind, stage, microbatch = task
        if kind is TaskKind.BW and (TaskKind.BI, stage, microbatch) not in seen:
            inputs = TaskName(kind=TaskKind.BI, stage=stage, microbatch=microbatch).code
            raise _error(rank, task, (f"stands before its {inputs}", f"list {inputs} first"))


def _error(rank: int, task: _Task, wrong: tuple[str, str]) -> StrategyError:
    name = TaskName(kind=task[0], stage=task[1], microbatch=task[2])
    return StrategyError(
        where=f"order of pipeline rank {rank}", field="task", value=name.code, rule=wrong[0], fix=wrong[1]
    )

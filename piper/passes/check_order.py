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
            listed = [task for slot in row for task in slot]
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


def _tasks(graph: Graph, rank: int, present: set[TaskName], *, runs: dict[int, bool]) -> Iterator[TaskName]:
    """Yield what a row must have; a backward is split where the row has one of its halves."""
    backward = {n.stage for n in graph.nodes if n.kind is TaskKind.B}
    for stage in graph.stages_of_rank(rank):
        second = graph.pipeline_rank_of_stage[stage] != rank
        for microbatch in range(len(graph.micro_batch_sizes)):
            if runs.get(microbatch, False) is not second:
                continue
            yield TaskName(kind=TaskKind.F, stage=stage, microbatch=microbatch)
            if stage in backward:
                halves = _halves(stage, microbatch)
                whole = TaskName(kind=TaskKind.B, stage=stage, microbatch=microbatch)
                yield from halves if present.intersection(halves) else (whole,)


def _halves(stage: int, microbatch: int) -> tuple[TaskName, TaskName]:
    inputs = TaskName(kind=TaskKind.BI, stage=stage, microbatch=microbatch)
    return inputs, TaskName(kind=TaskKind.BW, stage=stage, microbatch=microbatch)


def _unwanted(graph: Graph, rank: int, task: TaskName) -> tuple[str, str]:
    """Return rule and fix for a task that a row must not have."""
    own = task.stage in graph.stages_of_rank(rank) and task.microbatch in range(len(graph.micro_batch_sizes))
    if own and task.kind is not TaskKind.B:
        return "runs its other stages in the other direction", "keep a microbatch in one direction"
    if own:
        return "stands beside its halves BI and BW", "keep B, or BI and BW"
    return "is not a task of this pipeline rank", "leave it out"


def _check_halves(rank: int, listed: Sequence[TaskName]) -> None:
    seen: set[TaskName] = set()
    for task in listed:
        seen.add(task)
        if task.kind is TaskKind.BW:
            inputs = _halves(task.stage, task.microbatch)[0]
            if inputs not in seen:
                wrong = (f"stands before its {inputs.code}", f"list {inputs.code} first")
                raise _error(rank, task, wrong)


def _error(rank: int, task: TaskName, wrong: tuple[str, str]) -> StrategyError:
    return StrategyError(
        where=f"order of pipeline rank {rank}", field="task", value=task.code, rule=wrong[0], fix=wrong[1]
    )

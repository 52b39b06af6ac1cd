"""Check the order rows against the graph, so that emission can trust them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

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
            if _is_right(graph, rank, runs=runs):
                continue
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


def _is_right(graph: Graph, rank: int, *, runs: Mapping[int, bool]) -> bool:
    """Return whether a row is right, by counting: what is not is looked at task by task."""
    number, microbatches = graph.num_stages, len(graph.micro_batch_sizes)
    row = [(t.stage, t.microbatch, _LETTER.get(t.kind, _OTHER)) for slot in graph.rows[rank] for t in slot]
    listed = np.array(row, dtype=np.int64).reshape(-1, 3)
    stage, microbatch, letter = listed.T
    if np.any(
        (stage >= number) | (microbatch >= microbatches) | (letter == _OTHER) | (listed.min(axis=1) < 0)
    ):
        return False
    code = (stage * microbatches + microbatch) * _OTHER + letter
    counts = np.bincount(code, minlength=number * microbatches * _OTHER).reshape(number, microbatches, _OTHER)
    backward = np.zeros(number, dtype=np.int64)
    backward[[n.stage for n in graph.nodes if n.kind is TaskKind.B]] = 1
    own = np.zeros((number, microbatches), dtype=np.int64)
    second = np.array([runs.get(m, False) for m in range(microbatches)])
    for held in graph.stages_of_rank(rank):
        own[held] = second == (graph.pipeline_rank_of_stage[held] != rank)
    forward, whole, inputs, weights = np.moveaxis(counts, -1, 0)
    expected = own * backward[:, None]
    place = np.full(number * microbatches * _OTHER, -1, dtype=np.int64)
    place[code] = np.arange(len(code))
    halves = place.reshape(-1, _OTHER)[:, 2:]
    return bool(
        np.array_equal(forward, own)
        and np.array_equal(whole + inputs, expected)
        and np.array_equal(whole + weights, expected)
        and np.all(halves[:, 0] <= halves[:, 1])
    )


_LETTER = {TaskKind.F: 0, TaskKind.B: 1, TaskKind.BI: 2, TaskKind.BW: 3}
_OTHER = len(_LETTER)


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

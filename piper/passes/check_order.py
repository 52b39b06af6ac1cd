"""Check the order rows against the graph, so that emission can trust them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from piper.errors import StrategyError
from piper.graph.graph import Graph
from piper.graph.parts import Parts
from simulator.plan import NONE, TaskKind, TaskName


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOrder:
    """Raise unless each rank's row has every F, and every B or both its halves, of its stages once.

    What a row names part by part ([Note: parts]) it has with all its parts, each behind those that it needs.
    Where stages have two homes, a microbatch has all its tasks at the first ones, or all at the second ones.

    rewrite: graph -> the same graph
    """

    def apply(self, graph: Graph) -> Graph:
        """Return the graph; raises StrategyError naming the rank and the task."""
        runs = _directions(graph)
        parts = Parts(graph=graph)
        for rank, row in enumerate(graph.rows):
            if _is_right(graph, rank, runs=runs):
                continue
            where = (graph.row_lines[rank] if graph.row_lines else "") or f"order of pipeline rank {rank}"
            listed = [task for slot in row for task in slot]
            present = set(listed)
            wanted = dict.fromkeys(_tasks(parts, rank, present, runs=runs))
            for task in listed:
                if task not in wanted:
                    raise _error(where, task, _unwanted(parts, rank, task))
            if len(present) != len(listed):
                twice = next(task for i, task in enumerate(listed) if task in listed[:i])
                raise _error(where, twice, ("stands twice in the order", "keep one of them"))
            for task in wanted:
                if task not in present:
                    raise _error(where, task, ("is missing from the order", "add it"))
            _check_halves(where, listed, present)
            _check_parts(parts, where, listed)
        return graph


def _is_right(graph: Graph, rank: int, *, runs: Mapping[int, bool]) -> bool:
    """Return whether a row is right, by counting: what is not is looked at task by task."""
    number, microbatches = graph.num_stages, len(graph.micro_batch_sizes)
    row = [(t.stage, t.microbatch, _LETTER.get(t.kind, _OTHER)) for slot in graph.rows[rank] for t in slot]
    if any(task.part != NONE for slot in graph.rows[rank] for task in slot):
        return False
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
_HALVES = (TaskKind.BI, TaskKind.BW)


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


def _tasks(parts: Parts, rank: int, present: set[TaskName], *, runs: dict[int, bool]) -> Iterator[TaskName]:
    """Yield what a row must have: a backward split, or a pass in parts, where the row has one of them."""
    graph = parts.graph
    passes = {(task.kind, task.stage, task.microbatch) for task in present}
    divided = {(task.kind, task.stage, task.microbatch) for task in present if task.part != NONE}
    for stage in graph.stages_of_rank(rank):
        second = graph.pipeline_rank_of_stage[stage] != rank
        for microbatch in range(len(graph.micro_batch_sizes)):
            if runs.get(microbatch, False) is not second:
                continue
            kinds = [TaskKind.F]
            if parts.of(TaskKind.B, stage):
                split = any((kind, stage, microbatch) in passes for kind in _HALVES)
                kinds += _HALVES if split else [TaskKind.B]
            for kind in kinds:
                whole = TaskName(kind=kind, stage=stage, microbatch=microbatch)
                named = (kind, stage, microbatch) in divided
                yield from (replace(whole, part=i) for i in parts.of(kind, stage)) if named else (whole,)


def _unwanted(parts: Parts, rank: int, task: TaskName) -> tuple[str, str]:
    """Return rule and fix for a task that a row must not have."""
    graph = parts.graph
    own = task.stage in graph.stages_of_rank(rank) and task.microbatch in range(len(graph.micro_batch_sizes))
    if own and task.part != NONE and task.part not in parts.of(task.kind, task.stage):
        return "is no part of its stage", "compile the strategy with this order"
    if own and any(
        t.part != NONE and replace(t, part=NONE) == task for slot in graph.rows[rank] for t in slot
    ):
        return "stands beside its parts", "name the stage, or its parts"
    if own and task.kind is not TaskKind.B:
        return "runs its other stages in the other direction", "keep a microbatch in one direction"
    if own:
        return "stands beside its halves BI and BW", "keep B, or BI and BW"
    return "is not a task of this pipeline rank", "leave it out"


def _check_halves(where: str, listed: Sequence[TaskName], present: set[TaskName]) -> None:
    seen: set[TaskName] = set()
    for task in listed:
        seen.add(task)
        inputs = replace(task, kind=TaskKind.BI)
        if task.kind is TaskKind.BW and inputs in present and inputs not in seen:
            raise _error(where, task, (f"stands before its {inputs.code}", f"list {inputs.code} first"))


def _check_parts(parts: Parts, where: str, listed: Sequence[TaskName]) -> None:
    """Raise where a part stands before another one of its stage and microbatch whose results it needs."""
    divided = {(task.stage, task.microbatch) for task in listed if task.part != NONE}
    todo = {
        (place, task.microbatch): task
        for task in listed
        if (task.stage, task.microbatch) in divided
        for place in parts.of_task(task)
    }
    for task in listed:
        own = parts.of_task(task) if (task.stage, task.microbatch) in divided else ()
        for place in own:
            del todo[place, task.microbatch]
        for needed in (needed for place in own for needed in parts.needs[place]):
            missing = todo.get((needed, task.microbatch))
            if missing is not None:
                rule = f"stands before {missing.code}, whose results it needs"
                raise _error(where, task, (rule, f"list {missing.code} first"))


def _error(where: str, task: TaskName, wrong: tuple[str, str]) -> StrategyError:
    return StrategyError(where=where, field="task", value=task.code, rule=wrong[0], fix=wrong[1])

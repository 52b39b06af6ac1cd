"""Check the order rows against the graph, so that emission can trust them."""

from __future__ import annotations

from dataclasses import dataclass

from piper.errors import StrategyError
from piper.graph.graph import Graph
from simulator.plan import TaskKind, TaskName


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOrder:
    """Raise unless each rank's row has every F and B of its stages once; the graph stays as it is.

    rewrite: graph -> the same graph
    """

    def apply(self, graph: Graph) -> Graph:
        """Return the graph; raises StrategyError naming the rank and the task."""
        for rank, row in enumerate(graph.rows):
            listed = [task for slot in row for task in slot]
            wanted, present = _tasks(graph, rank), set(listed)
            for task in listed:
                if task not in wanted:
                    raise _error(rank, task, "is not a task of this pipeline rank", fix="leave it out")
            if len(present) != len(listed):
                twice = next(task for i, task in enumerate(listed) if task in listed[:i])
                raise _error(rank, twice, "stands twice in the order", fix="keep one of them")
            for task in wanted:
                if task not in present:
                    raise _error(rank, task, "is missing from the order", fix="add it")
        return graph


def _tasks(graph: Graph, rank: int) -> dict[TaskName, None]:
    backward = {n.stage for n in graph.nodes if n.kind is TaskKind.B}
    return dict.fromkeys(
        TaskName(kind=kind, stage=stage, microbatch=microbatch)
        for stage in graph.stages_of_rank(rank)
        for kind in (TaskKind.F, TaskKind.B)
        for microbatch in range(len(graph.micro_batch_sizes))
        if kind is TaskKind.F or stage in backward
    )


def _error(rank: int, task: TaskName, rule: str, *, fix: str) -> StrategyError:
    return StrategyError(
        where=f"order of pipeline rank {rank}", field="task", value=task.code, rule=rule, fix=fix
    )

"""Groups of ranks are the ones that their axis and their collectives mean.

[Note: who belongs together]
A group of axis "tp" or "cp" of one pipeline rank has a set for every choice of the other two axes of the
device's mesh: its ranks differ in that axis only, and none is missing. A group of axis "pp" over several
pipeline ranks has sets of one rank of each, at the same place. What is summed once per step without a bucket
is the square of the gradient norm: all ranks of the job are one set. Which ranks of dp and ep belong
together, the gradients say that must be complete (`contributions`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simulator.plan.checks.facts import DeviceFacts, Facts
from simulator.plan.checks.violation import Violation
from simulator.plan.mesh import Group
from simulator.plan.plan import Plan
from simulator.plan.task import NONE, TaskKind

Sets = tuple[tuple[int, ...], ...]
_AXES = ("dp", "cp", "tp")
"""Of a pipeline rank's ranks, slowest first."""


def check_groups(facts: Facts) -> list[Violation]:
    """Find groups whose sets of ranks are not those that their axis or use asks for."""
    normed = {number for device in facts.devices for number in _groups_of_norm(device)}
    return [
        Violation(rule="group-members", message=_message(group, wanted))
        for number, group in enumerate(facts.plan.groups)
        for wanted in _wanted(facts.plan, group, is_norm=number in normed)
        if wanted != tuple(sorted(group.members))
    ]


def _groups_of_norm(device: DeviceFacts) -> list[int]:
    table = device.plan.tasks
    chosen = (table.kind == TaskKind.ALL_REDUCE) & (table.bucket == NONE) & (table.microbatch == NONE)
    return [int(group) for group in np.unique(table.group[chosen])]


def _wanted(plan: Plan, group: Group, *, is_norm: bool) -> Iterator[Sets]:
    """Yield the sets that a group must have, where something says so."""
    if is_norm:
        yield (tuple(range(plan.mesh.num_ranks)),)
    elif len(group.pipeline_ranks) > 1 and group.axis == "pp":
        grid = np.stack([_ranks(plan, rank) for rank in group.pipeline_ranks], axis=1)
        yield _sets(grid)
    elif group.axis in ("tp", "cp"):
        (rank,) = group.pipeline_ranks
        sizes = [plan.axis_size(axis, pipeline_rank=rank) for axis in _AXES]
        grid = np.moveaxis(_ranks(plan, rank).reshape(sizes), _AXES.index(group.axis), -1)
        yield _sets(grid.reshape(-1, grid.shape[-1]))


def _ranks(plan: Plan, pipeline_rank: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    mesh = plan.mesh
    ranks = mesh.ranks(pp=pipeline_rank) if "pp" in dict(mesh.axes) else mesh.ranks()
    return np.array(ranks, dtype=np.int64)


def _sets(grid: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Sets:
    return tuple(sorted(tuple(row) for row in np.sort(grid, axis=1).tolist()))


def _message(group: Group, wanted: Sets) -> str:
    have, want = sorted(group.members), list(wanted)
    strange = next((ranks for ranks in have if ranks not in want), have[0])
    missed = next((ranks for ranks in want if ranks not in have), want[0])
    return f"group {group.name} has the ranks {_few(strange)} where {_few(missed)} belong together"


def _few(ranks: tuple[int, ...]) -> str:
    most = 8
    listed = ", ".join(map(str, ranks[:most]))
    return f"({listed}{', ...' if len(ranks) > most else ''})"

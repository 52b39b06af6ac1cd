"""What makes rows a schedule, on columns of numbers: passes as often and where they must be, no deadlock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from piper.schedules.copies import Copies
from simulator.plan.task import NONE, TaskKind, TaskName

if TYPE_CHECKING:
    from piper.schedules.rows import Rows, Slot

_KINDS = (TaskKind.F, TaskKind.B, TaskKind.BI, TaskKind.BW)
_LARGEST = 2**62

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """The passes of rows, one after the other, rank by rank.

    Args:
        rows: the order of each pipeline rank.
        tasks: the passes.
        rank, kind, stage, microbatch: of each pass, int64 [passes].
    """

    rows: Rows
    tasks: list[TaskName]
    rank: Numbers
    kind: Numbers
    stage: Numbers
    microbatch: Numbers

    @classmethod
    def of(cls, rows: Rows) -> Columns:
        """Return the columns of rows."""
        tasks = [task for row in rows for slot in row for task in slot]
        lengths = [sum(map(len, row)) for row in rows]
        return cls(
            rows=rows,
            tasks=tasks,
            rank=np.repeat(np.arange(len(rows)), lengths),
            kind=_numbers([task.kind for task in tasks]),
            stage=_numbers([task.stage for task in tasks]),
            microbatch=_numbers([task.microbatch for task in tasks]),
        )


def misplaced(found: Columns, stages: Sequence[Sequence[int]], num_microbatches: int) -> Iterator[str]:
    """Yield the passes of stages and microbatches that there are not, or on a rank that lacks their stage."""
    owner = {stage: rank for rank, held in enumerate(stages) for stage in held}
    home = np.full(max(owner, default=0) + 2, NONE, dtype=np.int64)
    home[list(owner)] = list(owner.values())
    homes = home[np.minimum(found.stage, len(home) - 1)]
    for i in np.flatnonzero((homes != found.rank) | (found.microbatch >= num_microbatches)).tolist():
        task, rank = found.tasks[i], int(found.rank[i])
        if task.stage not in owner:
            yield f"{task.code} of rank {rank}: there are only stages 0..{len(owner) - 1}"
        elif task.microbatch >= num_microbatches:
            yield f"{task.code} of rank {rank}: there are only microbatches 0..{num_microbatches - 1}"
        else:
            yield f"{task.code} stands on rank {rank}, but stage {task.stage} is on {owner[task.stage]}"


def miscounted(found: Columns, copies: Copies, num_microbatches: int) -> Iterator[str]:
    """Yield the stages and microbatches without F once and B once, or BI and BW once each."""
    shape = (copies.num_stages, num_microbatches)
    known = (found.stage < shape[0]) & (found.microbatch < shape[1])
    cell = found.stage[known] * num_microbatches + found.microbatch[known]
    forward, fused, inputs, weights = (
        np.bincount(cell[found.kind[known] == kind], minlength=shape[0] * shape[1]).reshape(shape)
        for kind in _KINDS
    )
    wanted = np.zeros(shape, dtype=np.bool_)
    for stage in range(copies.num_stages):
        wanted[stage, copies.microbatches(stage, num_microbatches)] = True
    whole = ((fused == 1) & (inputs + weights == 0)) | ((fused == 0) & (inputs == 1) & (weights == 1))
    none = forward + fused + inputs + weights == 0
    for stage, microbatch in np.argwhere(np.where(wanted, (forward != 1) | ~whole, ~none)).tolist():
        where = f"stage {stage} microbatch {microbatch}"
        if not wanted[stage, microbatch]:
            own = copies.microbatches(stage, num_microbatches)
            yield f"{where}: this copy of the model runs only microbatches {own[0]}..{own[-1]}"
            continue
        if forward[stage, microbatch] != 1:
            yield f"{where}: F stands {forward[stage, microbatch]} times, must be once"
        if not whole[stage, microbatch]:
            counts = zip((fused, inputs, weights), _KINDS[1:], strict=True)
            shown = ", ".join(f"{count[stage, microbatch]} {kind.name}" for count, kind in counts)
            yield f"{where}: there are {shown}, must be 1 B, or 1 BI and 1 BW"


def blocked(found: Columns, copies: Copies) -> Iterator[str]:
    """Run the rows on dataflow alone; yield the slot at which each rank is stuck for ever."""
    flow = _Dataflow(found, copies)
    flow.run()
    first = 0
    for rank, row in enumerate(found.rows):
        place = flow.place[rank] - first
        if place < len(row):
            need = flow.shown(flow.missing(flow.place[rank]))
            yield f"rank {rank} is stuck at slot {place}, {_codes(row[place])}, which needs {need}"
        first += len(row)


class _Dataflow:
    """Ranks that run their slots as soon as the inputs are there.

    [Note: results by number]
    With N = stages * M, the output of F of a stage and microbatch is number stage * M + microbatch, and the
    input's gradient (B, BI) is N more. `always` is there from the start, for a pass that needs no input;
    `never` is what BW gives: nothing to others.
    """

    def __init__(self, found: Columns, copies: Copies) -> None:
        self.num_microbatches = int(found.microbatch.max(initial=NONE)) + 1
        self.count = copies.num_stages * self.num_microbatches
        always, never = 2 * self.count, 2 * self.count + 1
        own = found.stage * self.num_microbatches + found.microbatch
        forward, weights = found.kind == TaskKind.F, found.kind == TaskKind.BW

        def result(*, behind: bool) -> Numbers:
            goals = [copies.goal(stage, forward=behind) for stage in range(copies.num_stages)]
            goal = np.array(goals, dtype=np.int64)[found.stage]
            return np.where(goal == NONE, NONE, goal * self.num_microbatches + found.microbatch)

        before, behind = result(behind=False), result(behind=True)
        first = np.where(forward, before, np.where(weights, self.count + own, own))
        second = np.where(forward | weights | (behind == NONE), NONE, self.count + behind)
        gives = np.where(forward, own, np.where(weights, never, self.count + own))
        self.first: list[int] = np.where(first == NONE, always, first).tolist()
        self.second: list[int] = np.where(second == NONE, always, second).tolist()
        self.gives: list[int] = gives.tolist()
        self.starts = [0, *accumulate(len(slot) for row in found.rows for slot in row)]
        self.ends = list(accumulate(len(row) for row in found.rows))
        self.place = [0, *self.ends][:-1]
        self.done = bytearray(2 * self.count + 2)
        self.done[always] = 1

    def run(self) -> None:
        """Run all ranks as far as they can go."""
        done, gives, starts, place = self.done, self.gives, self.starts, self.place
        waiting: dict[int, list[int]] = {}
        ready = list(range(len(place)))
        while ready:
            rank = ready.pop()
            slot, end = place[rank], self.ends[rank]
            while slot < end:
                missing = self.missing(slot)
                if missing != NONE:
                    waiting.setdefault(missing, []).append(rank)
                    break
                for result in gives[starts[slot] : starts[slot + 1]]:
                    done[result] = 1
                    if result in waiting:
                        ready += waiting.pop(result)
                slot += 1
            place[rank] = slot

    def missing(self, slot: int) -> int:
        """Return the first result that a slot lacks, or NONE."""
        done, first, second = self.done, self.first, self.second
        for i in range(self.starts[slot], self.starts[slot + 1]):
            if not done[first[i]]:
                return first[i]
            if not done[second[i]]:
                return second[i]
        return NONE

    def shown(self, result: int) -> str:
        """Return the name of a result: `2F0`, or `2B0` for a gradient."""
        gradient, cell = divmod(result, self.count)
        stage, microbatch = divmod(cell, self.num_microbatches)
        return f"{stage}{'B' if gradient else 'F'}{microbatch}"


def _numbers(values: Sequence[int]) -> Numbers:
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        return np.array([min(value, _LARGEST) for value in values], dtype=np.int64)


def _codes(slot: Slot) -> str:
    return " and ".join(task.code for task in slot)

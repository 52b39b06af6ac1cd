"""Orders of schedules as arrays: what a kernel needs to time them, and what each rank holds at once.

[Note: timing an order]
Passes of a rank run in the order of its row, each after what it needs from another stage. With times that are
lower bounds of a simulation's, the end of the last pass is one, too: later inputs never make a pass earlier.
Orders of many microbatches are timed at two smaller counts, and what a microbatch more costs is added for the
rest: that is an estimate, no bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.errors import check_invariant
from piper.schedules import copies_of, find_schedule, schedule_rows, stages_of
from piper.schedules.copies import Copies
from piper.schedules.costs import Costs
from piper.schedules.rows import Rows
from piper.search.held import held_of_rows
from simulator.compiled import kept
from simulator.plan import NONE, TaskKind, TaskName

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MOST_TIMED = 64
"""Microbatches up to which an order is timed as it is."""
_ROUNDS = 2
"""Microbatches of the shorter one of two orders, in pipeline ranks: by then most schedules repeat."""
_HOLDS_ALL = frozenset({"gpipe", "looped_bfs"})
_FORWARD, _BACKWARD, _WEIGHTS = range(3)
_PASS_OF = {TaskKind.F: _FORWARD, TaskKind.B: _BACKWARD, TaskKind.BI: _BACKWARD, TaskKind.BW: _WEIGHTS}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassTimes:
    """Times of the passes of every stage, float64 [3, stages] (F, B or BI, BW), in ns.

    Args:
        span_ns, lead_ns, trail_ns, busy_ns: as in `UnitCosts`.
        drain_ns: float64 [stages].
    """

    span_ns: Floats
    lead_ns: Floats
    trail_ns: Floats
    busy_ns: Floats
    drain_ns: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimedOrder:
    """An order as columns, in an order in which what is needed comes first.

    Args:
        rank, stage, kind: int64 [passes]; kind: F, B (or BI), BW, as in `UnitCosts`.
        whole: int64 [passes], 1 where a backward is not cut in two.
        needs: int64 [passes], the pass whose result it needs, or NONE.
        crosses: int64 [passes], 1 where that one ran on another rank.
        joined: int64 [passes], the pass that begins with it in one slot, or NONE.
        num_microbatches: of the order.
    """

    rank: Ints
    stage: Ints
    kind: Ints
    whole: Ints
    needs: Ints
    crosses: Ints
    joined: Ints
    num_microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OrderTable:
    """Orders of one schedule, by which a number of microbatches is timed.

    Args:
        orders: one, or two with different numbers of microbatches.
        num_microbatches: that are asked for.
        held: int64 [ranks, stages on a rank], microbatches of each that a rank holds when it holds most.
        stages_of_rank: the stages of the model on each rank, rising.
    """

    orders: tuple[TimedOrder, ...]
    num_microbatches: int
    held: Ints
    stages_of_rank: tuple[tuple[int, ...], ...]

    @property
    def is_exact(self) -> bool:
        """Return whether the order itself is timed."""
        return self.orders[-1].num_microbatches == self.num_microbatches

    def ends_ns(self, times: PassTimes, *, transfer_ns: float, begin_ns: Floats) -> Floats:
        """Return when each rank ends, float64 [ranks].

        Args:
            times: of the passes of every stage.
            transfer_ns: between ranks.
            begin_ns: float64 [ranks], before the first pass of each rank.
        """
        ends = [
            np.asarray(
                _run(
                    order.rank, order.stage, order.kind, order.whole,
                    order.needs, order.crosses, order.joined,
                    times.span_ns, times.drain_ns, times.lead_ns, times.trail_ns, times.busy_ns,
                    transfer_ns, begin_ns,
                )
            )
            for order in self.orders
        ]  # fmt: skip
        if len(ends) == 1:
            return ends[0]
        first, last = self.orders
        each = (ends[1] - ends[0]) / (last.num_microbatches - first.num_microbatches)
        return np.asarray(ends[1] + each * (self.num_microbatches - last.num_microbatches))


@lru_cache(maxsize=4096)
def order_table(
    schedule: str, *, pp: int, vp: int, num_microbatches: int, costs: tuple[tuple[str, Any], ...]
) -> OrderTable:
    """Return the orders of a schedule; raises StrategyError for counts that it does not take."""
    counts = _counts(pp, num_microbatches)
    number = copies_of(find_schedule(schedule))
    copies = Copies(num_stages=pp * vp, count=number)
    virtual = stages_of(schedule, num_pipeline_ranks=pp, virtual_stages_per_rank=vp)
    rows = [
        schedule_rows(
            schedule, num_pipeline_ranks=pp, num_microbatches=count, virtual_stages_per_rank=vp,
            costs=dict(costs),
        )
        for count in counts
    ]  # fmt: skip
    held = held_of_rows(rows[-1], copies)
    if schedule in _HOLDS_ALL:
        held = np.full_like(held, num_microbatches)
    return OrderTable(
        orders=tuple(_timed(r, copies, count) for r, count in zip(rows, counts, strict=True)),
        num_microbatches=num_microbatches,
        held=held,
        stages_of_rank=tuple(tuple(sorted({copies.copy_of(s)[0] for s in listed})) for listed in virtual),
    )


def cost_key(costs: Costs) -> tuple[tuple[str, Any], ...]:
    """Return costs of passes as a key."""
    return tuple(costs.items())


def _counts(pp: int, number: int) -> tuple[int, ...]:
    if number <= max(MOST_TIMED, (_ROUNDS + 1) * pp):
        return (number,)
    first = _ROUNDS * pp + (number - _ROUNDS * pp) % pp
    return (first, first + pp)


def _timed(rows: Rows, copies: Copies, number: int) -> TimedOrder:
    done: dict[tuple[int, int, int], int] = {}
    tasks = {(task.kind, task.stage): task for row in rows for slot in row for task in slot}
    sources = {key: _source(task, copies) for key, task in tasks.items()}
    homes = {stage: copies.copy_of(stage)[0] for _, stage in tasks}
    columns: list[tuple[int, ...]] = []
    place = [0] * len(rows)
    left = sum(len(row) for row in rows)
    while left:
        before = left
        for rank, row in enumerate(rows):
            while place[rank] < len(row):
                needed = [
                    None if source is None else (*source, task.microbatch)
                    for task in row[place[rank]]
                    for source in [sources[task.kind, task.stage]]
                ]
                if any(need is not None and need not in done for need in needed):
                    break
                first = len(columns)
                for task, need in zip(row[place[rank]], needed, strict=True):
                    kind = _PASS_OF[task.kind]
                    source = NONE if need is None else done[need]
                    columns.append(
                        (
                            rank, homes[task.stage], kind, int(task.kind is TaskKind.B), source,
                            int(source != NONE and columns[source][0] != rank),
                            first if len(columns) > first else NONE,
                        )
                    )  # fmt: skip
                for index, task in enumerate(row[place[rank]]):
                    done[task.stage, _PASS_OF[task.kind], task.microbatch] = first + index
                place[rank] += 1
                left -= 1
        check_invariant(left < before, "rows that can run are stuck")
    table = np.array(columns, dtype=np.int64).reshape(-1, 7)
    names = ("rank", "stage", "kind", "whole", "needs", "crosses", "joined")
    parts = {name: np.ascontiguousarray(column) for name, column in zip(names, table.T, strict=True)}
    return TimedOrder(num_microbatches=number, **parts)


def _source(task: TaskName, copies: Copies) -> tuple[int, int] | None:
    """Return (virtual stage, pass) whose result a pass needs, or None: only its rank's order."""
    if task.kind is TaskKind.BW:
        return (task.stage, _BACKWARD)
    forward = task.kind is TaskKind.F
    source = copies.goal(task.stage, forward=not forward)
    if source != NONE:
        return (source, _FORWARD if forward else _BACKWARD)
    return None if forward else (task.stage, _FORWARD)


def _timing(  # noqa: PLR0917 (a kernel takes arrays)
    rank: Ints,
    stage: Ints,
    kind: Ints,
    whole: Ints,
    needs: Ints,
    crosses: Ints,
    joined: Ints,
    span_ns: Floats,
    drain_ns: Floats,
    lead_ns: Floats,
    trail_ns: Floats,
    busy_ns: Floats,
    transfer_ns: float,
    begin_ns: Floats,
) -> Floats:
    """Return when each rank ends; see [Note: timing an order]."""
    free = begin_ns.copy()
    out = np.zeros(len(rank))
    slot, filled = 0.0, 0.0
    for i in range(len(rank)):
        r, s, k = rank[i], stage[i], kind[i]
        ready = 0.0
        if needs[i] >= 0:
            ready = out[needs[i]] + (transfer_ns if crosses[i] else 0.0)
        length, least, busy = span_ns[k, s], span_ns[k, s], busy_ns[k, s]
        if k == 1:
            least = drain_ns[s]
            if whole[i]:
                length += span_ns[2, s]
                least += span_ns[2, s]
                busy += busy_ns[2, s]
        if joined[i] < 0:
            slot, filled = free[r], 0.0
        filled += busy
        out[i] = max(slot + length - lead_ns[k, s], ready + least)
        free[r] = max(free[r], slot + filled, out[i] - trail_ns[k, s])
    return free


_run: Any = kept(_timing)

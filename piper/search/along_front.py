"""Simulate along the front: strategies that are estimated to be faster at their memory than what is known.

[Note: along the front]
A search for the fastest looks where the fastest may be. The rest of the front, slower and with less memory,
is looked for afterwards, in turns: cells on the staircase of likely times and least bytes are estimated, and
of the estimates those on the staircase of corrected times and bytes are simulated, evenly spread. It ends
with the simulations that are allowed, or where nothing promises to be on the front, even at the lowest ratios
to estimates that were seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from piper.search.status import Status

if TYPE_CHECKING:
    from piper.search.frontier import Point
    from piper.search.rounds import Rounds, Simulate

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

TURNS = 64
CELLS = 24
"""Cells that are estimated in a turn, at most."""
AT_ONCE = 4
"""Simulations of a turn, at most."""


def simulate_along_front(rounds: Rounds, count: int, simulate: Simulate) -> None:
    """Simulate up to `count` more strategies; see [Note: along the front].

    Args:
        rounds: of a search for time that has ended.
        count: simulations, at most.
        simulate: simulates.
    """
    for _ in range(TURNS):
        if count <= 0:
            return
        _estimate(rounds)
        chosen = _promising(rounds)[: min(count, AT_ONCE)]
        if not chosen:
            return
        rounds.also(chosen, simulate)
        count -= len(chosen)


def _estimate(rounds: Rounds) -> None:
    """Estimate cells that may hold points of the front."""
    frontier, table = rounds.frontier, rounds.frontier.table
    is_open = np.isfinite(frontier.low)
    is_open[list(frontier.expanded)] = False
    cells = np.flatnonzero(is_open)
    times = table.likely_ns[cells] / 1e9 * rounds.corrections.typical
    stairs = _stairs(times, table.least_bytes[cells], known=_known(rounds))
    if len(stairs):
        frontier.estimate(cells[_spread(stairs, CELLS)])


def _promising(rounds: Rounds) -> list[Point]:
    """Return points on the staircase of estimates that nothing simulated beats, evenly spread."""
    points = [p for p in rounds.frontier.points if p.candidate not in rounds.records]
    if not points:
        return []
    for corrected in (rounds.corrections.of, rounds.corrections.optimistic):
        figures = np.array([corrected(point) for point in points], dtype=np.float64)
        fitting = np.flatnonzero(figures[:, 1] <= rounds.frontier.room_bytes)
        stairs = _stairs(figures[fitting, 0], figures[fitting, 1], known=_known(rounds))
        if len(stairs):
            return [points[i] for i in fitting[_spread(stairs, AT_ONCE)].tolist()]
    return []


def _known(rounds: Rounds) -> tuple[Floats, Floats]:
    """Return times, rising, and the least bytes up to each, of what was simulated and fits."""
    found = [r.result for r in rounds.records.values() if r.status is Status.RANKED and r.result]
    figures = sorted((r["step_time_s"], r["needed_memory_bytes"] - r["context_bytes"]) for r in found)
    table = np.array(figures, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], np.minimum.accumulate(table[:, 1])


def _stairs(times: Floats, sizes: Floats, *, known: tuple[Floats, Floats]) -> Ints:
    """Return which of n points no other one, and nothing known, is at least as good as; fastest first."""
    least = np.concatenate([[np.inf], known[1]])[np.searchsorted(known[0], times, side="right")]
    order = np.lexsort((np.arange(len(times)), sizes, times))
    order = order[sizes[order] < least[order]]
    if not len(order):
        return order.astype(np.int64)
    before = np.concatenate([[np.inf], np.minimum.accumulate(sizes[order])[:-1]])
    return np.asarray(order[sizes[order] < before], dtype=np.int64)


def _spread(stairs: Ints, most: int) -> Ints:
    """Return at most so many of them, evenly spread, both ends among them."""
    if len(stairs) <= most:
        return stairs
    return stairs[np.unique(np.linspace(0, len(stairs) - 1, most).round().astype(np.int64))]

"""`balanced_cut`: how many units each stage takes so that the busiest pipeline rank has least to do.

[Note: balanced cut]
The stages of a model are consecutive, and each takes a unit at least. A dynamic program finds the cut whose
largest stage is smallest: the best one where every rank holds one stage. Where ranks hold several, units then
move over borders between neighbours as long as the busiest rank has less to do, or, if that is the same,
loads are less unequal (the sum of their squares falls).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def balanced_cut(loads: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the units of each stage; there are at least as many units as stages.

    Args:
        loads: of each unit.
        ranks: of each stage, the pipeline rank that holds it.
    """
    counts = _smallest_largest(loads, len(ranks))
    best = _busy(loads, counts, ranks)
    moved = True
    while moved:
        moved = False
        for border in range(len(ranks) - 1):
            for giver, taker in ((border, border + 1), (border + 1, border)):
                if counts[giver] == 1:
                    continue
                tried = list(counts)
                tried[giver] -= 1
                tried[taker] += 1
                if (busy := _busy(loads, tried, ranks)) < best:
                    counts, best, moved = tried, busy, True
    return tuple(counts)


def _smallest_largest(loads: Sequence[int], num_stages: int) -> list[int]:
    """Return the cut whose largest load is smallest; of equal ones that with short early stages.

    They hold more microbatches at a time.
    """
    sums = [0, *accumulate(loads)]
    number = len(loads)
    largest = list(sums)  # of the first i units in one stage
    cuts: list[list[int]] = []
    for stage in range(1, num_stages):
        found, places = [sums[number] + 1] * (number + 1), [0] * (number + 1)
        for end in range(stage + 1, number + 1):
            for start in range(end - 1, stage - 1, -1):
                last = sums[end] - sums[start]
                if last > found[end]:
                    break
                if (most := max(largest[start], last)) <= found[end]:
                    found[end], places[end] = most, start
        cuts.append(places)
        largest = found
    counts, end = [], number
    for places in reversed(cuts):
        counts.append(end - places[end])
        end = places[end]
    return [end, *reversed(counts)]


def _busy(loads: Sequence[int], counts: Sequence[int], ranks: Sequence[int]) -> tuple[int, int]:
    """Return the load of the busiest rank, and the sum of squares."""
    of_rank: dict[int, int] = {}
    first = 0
    for count, rank in zip(counts, ranks, strict=True):
        of_rank[rank] = of_rank.get(rank, 0) + sum(loads[first : first + count])
        first += count
    return max(of_rank.values()), sum(load * load for load in of_rank.values())

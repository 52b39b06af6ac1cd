"""Measured times of communication, and what lies between them.

[Note: between measurements]
Between two measured sizes time is linear on logarithmic scales, between two measured numbers of ranks (at
equal bus bytes) or nodes (at equal bytes) likewise. Beyond the first and the last size the formula takes
over, scaled to meet the measurement; nothing is said beyond the measured numbers of nodes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

Formula = Callable[[float], float]
"""Seconds of a size in bytes."""


class Distance(StrEnum):
    """How far a time is from measurements: one of them, between them, beyond them."""

    EXACT = "exact"
    BETWEEN = "between"
    BEYOND = "beyond"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A time, and how far it is from measurements."""

    seconds: float
    distance: Distance


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Times of one operation of one group.

    Args:
        sizes_bytes: rising, all > 0.
        seconds: one of each size.
    """

    sizes_bytes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, size_bytes: float, formula: Formula) -> Timed:
        """Return the time of a size; see [Note: between measurements]."""
        sizes = self.sizes_bytes
        after = bisect_left(sizes, size_bytes)
        if after < len(sizes) and sizes[after] == size_bytes:
            return Timed(seconds=self.seconds[after], distance=Distance.EXACT)
        if after in {0, len(sizes)}:
            end = max(after - 1, 0)
            scale = self.seconds[end] / formula(sizes[end])
            return Timed(seconds=scale * formula(size_bytes), distance=Distance.BEYOND)
        ends = (sizes[after - 1], sizes[after])
        seconds = between(size_bytes, ends, (self.seconds[after - 1], self.seconds[after]))
        return Timed(seconds=seconds, distance=Distance.BETWEEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Times of one operation.

    Args:
        series: by (nodes, members on each of them).
        error: see [Note: error of a figure] in `gpu.py`; of measured times and those between them.
    """

    series: Mapping[tuple[int, int], Series]
    error: float

    def of_nodes(self, group: tuple[int, int], size_bytes: float, formula: Formula) -> Timed | None:
        """Return the time of a group of (nodes, members on each), None beyond the measured numbers."""
        found = self.series.get(group)
        if found is not None:
            return found.at(size_bytes, formula)
        nodes, members = group
        numbers = sorted(of for of, each in self.series if each == members)
        after = bisect_left(numbers, nodes)
        if after in {0, len(numbers)}:
            return None
        low, high = numbers[after - 1], numbers[after]
        few = self.series[low, members].at(size_bytes, formula)
        many = self.series[high, members].at(size_bytes, formula)
        return _of_both(few, many, between(nodes, (low, high), (few.seconds, many.seconds)))

    def of_ranks(self, ranks: int, bus_bytes: float, formula: Callable[[float, int], float]) -> Timed:
        """Return the time of `ranks` inside a node; series of bus bytes.

        Beyond the measured numbers of ranks the formula says how much more or less the nearest one takes.
        """
        numbers = sorted(members for _, members in self.series)
        after = bisect_left(numbers, ranks)
        near = numbers[min(after, len(numbers) - 1)]
        found = self.series[1, near].at(bus_bytes, lambda size: formula(size, near))
        if near == ranks:
            return found
        if after in {0, len(numbers)}:
            more = formula(bus_bytes, ranks) - formula(bus_bytes, near)
            return Timed(seconds=max(found.seconds + more, found.seconds / 2), distance=Distance.BEYOND)
        low = numbers[after - 1]
        few = self.series[1, low].at(bus_bytes, lambda size: formula(size, low))
        return _of_both(few, found, between(ranks, (low, near), (few.seconds, found.seconds)))


def between(place: float, places: tuple[float, float], values: tuple[float, float]) -> float:
    """Return the value at `place`, linear between two places on logarithmic scales."""
    part = math.log(place / places[0]) / math.log(places[1] / places[0])
    return values[0] * math.pow(values[1] / values[0], part)


def _of_both(few: Timed, many: Timed, seconds: float) -> Timed:
    beyond = Distance.BEYOND in {few.distance, many.distance}
    return Timed(seconds=seconds, distance=Distance.BEYOND if beyond else Distance.BETWEEN)

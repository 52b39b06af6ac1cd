"""How simulations differ from their estimates, learned while a search runs.

[Note: measured disagreement]
Estimates leave out contention, and what copies and gathers make others wait; by how much depends on how
states are kept, and on whether a bound (the host's launches, mostly) is the estimate. So ratios of simulation
to estimate are kept by class: the level of ZeRO, what waits on the host, whether exchanges run beside their
computation, passes beside each other, and the estimate above its bound; for bytes the schedule.
The estimates of a class without any are taken as they are: what may win by them is tried. Points are ranked
by their estimate times the mean ratio of their class; what remains is given up where it is not the best at
the ratio that nine tenths of its class are above.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from piper.search.frontier import Point
from piper.search.schedule_rules import RULES

SPARE = 1.1
"""Needed bytes over estimated ones before any is known: what the allocator reserves beyond live tensors."""
FEW = 3
"""Classes of which something was simulated before their ratios say something of others."""
TENTH = 10
"""One of so many simulations may be further below its estimate than what is given up for being too slow."""


@dataclass(kw_only=True)
class Corrections:
    """Ratios of simulations to estimates, by class; 1 where a class has none."""

    _times: dict[tuple[object, ...], list[float]] = field(default_factory=lambda: defaultdict(list))
    _bytes: dict[tuple[object, ...], list[float]] = field(default_factory=lambda: defaultdict(list))

    def learn(self, point: Point, result: Mapping[str, Any], *, objective: str) -> None:
        """Note a simulation."""
        value = result["peak_memory_bytes"] if objective == "memory" else result["step_time_s"]
        self._times[_time_class(point)].append(value / point.estimate)
        needed = result["needed_memory_bytes"] - result["context_bytes"]
        self._bytes[_memory_class(point)].append(needed / point.needed_bytes)

    def of(self, point: Point) -> tuple[float, float]:
        """Return the estimate of the objective and the needed bytes, corrected."""
        times = self._times.get(_time_class(point), [])
        sizes = self._bytes.get(_memory_class(point)) or [
            r for listed in self._bytes.values() for r in listed
        ]
        estimate = max(point.estimate * _middle(times), point.bound)
        return estimate, point.needed_bytes * (_middle(sizes) if sizes else SPARE)

    def optimistic(self, point: Point) -> tuple[float, float]:
        """Return the same as low as nine tenths of the simulations of the class were."""
        times = self._times.get(_time_class(point), [])
        sizes = self._bytes.get(_memory_class(point)) or [
            r for listed in self._bytes.values() for r in listed
        ]
        estimate = max(point.estimate * _low(times), point.bound)
        return estimate, point.needed_bytes * _low(sizes)

    @property
    def typical(self) -> float:
        """Return the mean ratio of the class that is closest to its estimates; 1 as long as few are known."""
        ratios = [_middle(ratios) for ratios in self._times.values()]
        return min(ratios) if len(ratios) >= FEW else 1.0


def _time_class(point: Point) -> tuple[object, ...]:
    return *_kept_alike(point), point.estimate <= point.bound


def _kept_alike(point: Point) -> tuple[object, ...]:
    candidate = point.candidate
    rule = RULES.get(candidate.schedule)
    return candidate.zero, candidate.offload, candidate.async_tp, rule is not None and rule.overlaps


def _memory_class(point: Point) -> tuple[object, ...]:
    return *_kept_alike(point), point.candidate.schedule


def _low(ratios: list[float]) -> float:
    """Return the ratio that a tenth of them is below."""
    return sorted(ratios)[len(ratios) // TENTH] if ratios else 1.0


def _middle(ratios: list[float]) -> float:
    return median(ratios) if ratios else 1.0

"""Samples of a call -> median and spread, on a CPU by its clock, on a GPU by events on its stream.

[Note: samples]
A call is repeated until one sample lasts long enough for the clock; the median over samples leaves out what
other processes of the machine did, the distance of the quartiles says how much they did.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

_SAMPLE_S = 5e-4
"""Shortest sample: 10,000 times the resolution of the clock."""

_MOST_CALLS = 2000
_WARM_UP = 3
_KEPT = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What samples say.

    Args:
        time_s: median time of one call.
        repeats: samples.
        spread: distance of the quartiles over the median.
    """

    time_s: float
    repeats: int
    spread: float


def measure(call: Callable[[], object], *, device: str, repeats: int) -> Timing:
    """Time a call that takes no argument, after a warm-up; [Note: samples]."""
    for _ in range(_WARM_UP):
        call()
    sample = _on_gpu if device == "cuda" else _on_cpu
    once_s = max(sample(call, 1), 1e-7)
    calls = max(1, min(_MOST_CALLS, round(_SAMPLE_S / once_s)))
    return timing([sample(call, calls) for _ in range(repeats)])


def timing(samples_s: list[float]) -> Timing:
    """Return median and spread of samples."""
    median = statistics.median(samples_s)
    low, _, high = statistics.quantiles(samples_s, n=4) if len(samples_s) > 1 else (median,) * 3
    return Timing(time_s=median, repeats=len(samples_s), spread=(high - low) / median if median else 0.0)


def typical(samples_s: list[float]) -> Timing:
    """Return the mean without the longest quarter, and the spread.

    Where processes wait for each other, some samples are several times as long as most, and a step that
    makes many of them takes the mean, not the median, of each; other programs delay the longest.
    """
    kept = sorted(samples_s)[: max(1, round(_KEPT * len(samples_s)))]
    return replace(timing(samples_s), time_s=statistics.fmean(kept))


def _on_cpu(call: Callable[[], object], calls: int) -> float:
    begin = perf_counter()
    for _ in range(calls):
        call()
    return (perf_counter() - begin) / calls


def _on_gpu(call: Callable[[], object], calls: int) -> float:
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / calls

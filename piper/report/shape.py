"""What a result read from a file must hold before a report shows it: keys, and the kind of each value.

A shape is a `Kind`, a list of one shape (a list of such), or a dict: key -> shape (others may be there too),
or {ANY: shape} (any keys). `simulate --json` and `run --json` grow; a report asks for what it shows only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from simulator.plan.buffers import MemoryClass

ANY = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of value: what it must be, in words, and the test of it."""

    rule: str
    holds: Callable[[Any], bool]


_LARGEST = 1e30
"""No figure is larger, in any unit of a result; what is would not survive arithmetic or fit on a page."""


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < _LARGEST  # so NaN is none


COUNT = Kind(
    rule="must be a whole number >= 0", holds=lambda value: type(value) is int and 0 <= value < _LARGEST
)
SIGNED = Kind(rule="must be a finite number", holds=_is_number)
NUMBER = Kind(rule="must be a finite number >= 0", holds=lambda value: _is_number(value) and value >= 0)
POSITIVE = Kind(rule="must be a finite number > 0", holds=lambda value: _is_number(value) and value > 0)
OPTIONAL = Kind(
    rule="must be a finite number or null", holds=lambda value: value is None or _is_number(value)
)
TEXT = Kind(rule="must be a text", holds=lambda value: isinstance(value, str))
FLAG = Kind(rule="must be true or false", holds=lambda value: isinstance(value, bool))
OPTIONAL_FLAG = Kind(
    rule="must be true, false or null", holds=lambda value: value is None or isinstance(value, bool)
)
MAPPING = Kind(rule="must be an object", holds=lambda value: isinstance(value, Mapping))
ERRORS = Kind(
    rule="must be null or an object of numbers",
    holds=lambda value: (
        value is None or (isinstance(value, Mapping) and all(map(OPTIONAL.holds, value.values())))
    ),
)

_RANK = {
    "pipeline_rank": COUNT,
    "n_devices": COUNT,
    "stages": [COUNT],
    "busy_s": NUMBER,
    "peak_memory_bytes": COUNT,
    "peak_at_s": NUMBER,
    "memory_by_class_bytes": {entry.name.lower(): COUNT for entry in MemoryClass},
    "peak_owners": [{"owner": TEXT, "bytes": COUNT}],
}
SIMULATED: Mapping[str, Any] = {
    "model": TEXT,
    "n_parameters": COUNT,
    "cluster": TEXT,
    "n_gpus": COUNT,
    "strategy": {"shorthand": TEXT},
    "schedule": TEXT,
    "stack": TEXT,
    "defaults": MAPPING,
    "step_time_s": POSITIVE,
    "tokens_per_s": NUMBER,
    "tokens_per_s_per_gpu": NUMBER,
    "tflops_per_gpu": NUMBER,
    "mfu": NUMBER,
    "hfu": NUMBER,
    "mfu_convention": TEXT,
    "peak_memory_bytes": COUNT,
    "peak_reserved_bytes": COUNT,
    "context_bytes": COUNT,
    "communicator_bytes": COUNT,
    "needed_memory_bytes": COUNT,
    "device_memory_bytes": COUNT,
    "fits": FLAG,
    "bubble_fraction": NUMBER,
    "idle_fraction": NUMBER,
    "breakdown_s": {ANY: NUMBER},
    "ranks": [_RANK],
    "segments_per_stage": [COUNT],
    "error_band": {"step_time_low_s": NUMBER, "step_time_high_s": NUMBER, "basis": TEXT},
    "provenance": {ANY: NUMBER},
    "warnings": [TEXT],
}
"""Of `piper simulate --json`."""

TRAINED: Mapping[str, Any] = {
    "strategy": TEXT,
    "world_size": COUNT,
    "device": TEXT,
    "steps": [{"loss": SIGNED, "step_time_s": POSITIVE, "grad_norm": OPTIONAL}],
    "tokens_per_s": NUMBER,
    "peak_memory_bytes": COUNT,
    "verified": OPTIONAL_FLAG,
    "max_relative_error": ERRORS,
    "whole_batch_error": ERRORS,
    "predicted_step_time_s": OPTIONAL,
}
"""Of `piper run --json`."""

NEVER_EMPTY = ("ranks", "steps", "stages")
MAY_LACK = ("peak_owners", "segments_per_stage")


def shape_fault(value: object, shape: Any) -> str | None:
    """Return the first fault, such as "ranks[0].busy_s must be a finite number >= 0"; None: there is none."""
    return next(_faults(value, shape, ""), None)


def _faults(value: object, shape: Any, place: str) -> Iterator[str]:
    if isinstance(shape, Kind):
        if not shape.holds(value):
            yield f"{place} {shape.rule}"
    elif isinstance(shape, list):
        if not isinstance(value, list) or (not value and place.rpartition(".")[2] in NEVER_EMPTY):
            yield f"{place} must be a list, and not empty" if value == [] else f"{place} must be a list"
            return
        for number, entry in enumerate(value):
            yield from _faults(entry, shape[0], f"{place}[{number}]")
    elif not isinstance(value, Mapping):
        yield f"{place} must be an object"
    else:
        named = dict.fromkeys(value, shape[ANY]) if ANY in shape else shape
        for key, inner in named.items():
            inside = f"{place}.{key}" if place else key
            if key in value:
                yield from _faults(value[key], inner, inside)
            elif key not in MAY_LACK:
                yield f"{inside} is missing"

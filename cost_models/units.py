"""Quantities with units: text such as `80GiB`, `400Gb/s`, `28us`, `989.4TFLOP/s` into numbers, and back.

A plain number is in the base unit: bytes, bytes per second, seconds, FLOP/s. Case matters: `GB` is 10^9
bytes, `GiB` 2^30 bytes, `Gb/s` 10^9 bits per second.
"""

from __future__ import annotations

import math
import re
from enum import StrEnum

from cost_models.errors import CostModelError, as_float, nearest

_BIT = 0.125
_BYTE_PREFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_PREFIXES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_FLOP_PREFIXES = {"": 1, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}


class Dimension(StrEnum):
    """What a quantity measures; the value is an example for error messages."""

    BYTES = "80GiB"
    BYTES_PER_S = "400Gb/s or 50GB/s"
    SECONDS = "28us"
    FLOPS_PER_S = "989.4TFLOP/s"


_SIZES = {f"{prefix}B": float(scale) for prefix, scale in (_BYTE_PREFIXES | _BINARY_PREFIXES).items()}
_UNITS: dict[Dimension, dict[str, float]] = {
    Dimension.BYTES: _SIZES,
    Dimension.BYTES_PER_S: {f"{unit}/s": scale for unit, scale in _SIZES.items()}
    | {f"{prefix}b/s": scale * _BIT for prefix, scale in _BYTE_PREFIXES.items()},
    Dimension.SECONDS: {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
    Dimension.FLOPS_PER_S: {f"{prefix}FLOP/s": float(scale) for prefix, scale in _FLOP_PREFIXES.items()},
}
_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z/]*)\s*")


def parse_quantity(
    value: object, dimension: Dimension, *, where: str, field: str, zero_ok: bool = False
) -> float:
    """Return `value` in the base unit of `dimension`.

    Args:
        value: a number in the base unit, or text: a number and a unit.
        dimension: what it must measure.
        where, field: named in errors (file and key).
        zero_ok: accept 0.
    Raises: CostModelError for NaN, infinity, negative numbers, booleans, unknown units, other dimensions.
    """
    number = _number(value, dimension, where=where, field=field)
    if not (math.isfinite(number) and (number > 0 or (zero_ok and number == 0))):
        rule = "must be a number >= 0" if zero_ok else "must be a number > 0"
        raise _error(where, field, value, rule=rule, fix=f"give a quantity such as {dimension.value}")
    return number


def _number(value: object, dimension: Dimension, *, where: str, field: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return as_float(value)
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        rule = "must be a number with a unit"
        raise _error(where, field, value, rule=rule, fix=f"give a quantity such as {dimension.value}")
    number, unit = float(match[1]), match[2]
    units = _UNITS[dimension]
    if unit and unit not in units:
        hint = nearest(unit, units)
        fix = f"give a quantity such as {dimension.value}; {hint}"
        rule = f"has the unit {unit!r}, which does not fit here"
        raise _error(where, field, value, rule=rule, fix=fix)
    return number * units[unit] if unit else number


def _error(where: str, field: str, value: object, *, rule: str, fix: str) -> CostModelError:
    return CostModelError(where=where, field=field, value=value, rule=rule, fix=fix)


def format_bytes(size_bytes: float) -> str:
    """Return a size for people: binary units, two decimals (`79.10 GiB`); whole bytes below 1 KiB."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size_bytes) >= scale:
            return f"{size_bytes / scale:.2f} {unit}"
    return f"{size_bytes:.0f} B"


def format_duration(seconds: float) -> str:
    """Return a time for people, four significant digits: `12.34 s`, `5.600 ms`, `28.00 us`, `3.000 ns`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale:
            return f"{_four_digits(seconds / scale)} {unit}"
    return f"{_four_digits(seconds / 1e-9)} ns" if seconds else "0 s"


def _four_digits(number: float) -> str:
    whole_digits = len(str(int(abs(number))))
    return f"{number:.{max(0, 4 - whole_digits)}f}"

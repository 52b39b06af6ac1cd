"""Noise drawn beforehand: a table of factors, and a hash that says which of them a task takes.

The functions use + - * / ^ >> on float64, int64 and uint64 only, so that numba and numpy give the same bits.
[Note: draws] is implemented here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

TABLE_BITS = 16
TABLE_SIZE = 1 << TABLE_BITS
CHANCE_BITS = 53
"""A probability is compared in steps of 2^-53."""
_FRACTION_BITS = 32
"""Factors are whole multiples of 2^-32, so that they add up exactly."""
_FLOAT_NOISE = 1e-14
"""As in `simulator.rules`: [Note: completion rounding]."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A, _MIX_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_OF_DRAW, _OF_TASK = np.uint64(0xD6E8FEB86659FD93), np.uint64(0xA0761D6478BD642F)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)
_TO_TABLE, _TO_CHANCE = np.uint64(64 - TABLE_BITS), np.uint64(64 - CHANCE_BITS)


def mixed(bits: Any) -> Any:
    """Return 64 bits that depend on all of `bits` (uint64; splitmix64 of Steele, Lea, Flood 2014)."""
    bits = (bits ^ (bits >> _30)) * _MIX_A
    bits = (bits ^ (bits >> _27)) * _MIX_B
    return bits ^ (bits >> _31)


def with_draw(step_key: Any, draw: Any) -> Any:
    """Return bits (to be mixed) for those who draw together, in the step that has this key."""
    return step_key ^ (draw * _OF_DRAW)


def with_task(bits: Any, task: Any) -> Any:
    """Return bits (to be mixed) for one of their tasks."""
    return bits ^ (task * _OF_TASK)


def table_row(bits: Any) -> Any:
    """Return the row of a table of factors that mixed bits choose."""
    return bits >> _TO_TABLE


def for_chance(bits: Any) -> Any:
    """Return bits (to be mixed) that tell nothing of `table_row`."""
    return bits + _GOLDEN


def chance(bits: Any) -> Any:
    """Return a whole number in [0, 2^53) that mixed bits choose."""
    return bits >> _TO_CHANCE


def longer_ns(duration: Any, factor: Any) -> Any:
    """Return a duration in ns times a factor in whole ns, rounded up, as float64."""
    exact = duration * factor
    whole = np.floor(exact)
    return whole + (exact - whole > exact * _FLOAT_NOISE)


def step_key(seed: int, step: int) -> np.uint64:
    """Return what tells the draws of a step of a run from those of others."""
    numbers = np.array([seed, step], dtype=np.uint64)
    bits = mixed(numbers + _GOLDEN)
    return np.uint64(mixed(bits[:1] + bits[1:] * _MIX_A)[0])


def lognormal_factors(sigma: float) -> npt.NDArray[np.float64]:
    """Return the middle of each of 2^16 equally probable parts of a lognormal distribution of mean 1.

    Args:
        sigma: standard deviation of the logarithm.
    Returns: float64 [2^16], rising, whole multiples of 2^-32 whose mean is exactly 1.
    """
    from scipy.special import ndtri

    normal = ndtri((np.arange(TABLE_SIZE) + 0.5) / TABLE_SIZE)
    factor = np.exp(sigma * normal)
    whole = np.rint(factor * ((1 << _FRACTION_BITS) / factor.mean())).astype(np.int64)
    missing = (TABLE_SIZE << _FRACTION_BITS) - int(whole.sum())
    whole += missing // TABLE_SIZE
    whole[TABLE_SIZE - missing % TABLE_SIZE :] += 1
    factors: npt.NDArray[np.float64] = whole / float(1 << _FRACTION_BITS)
    return factors


def no_factors() -> npt.NDArray[np.float64]:
    """Return the table of no noise: empty."""
    return np.zeros(0, dtype=np.float64)

"""Draws: tables whose mean is exactly 1, and a hash that gives the same bits to numpy and to the kernel."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from simulator.jitter import draws

COMPILED = njit(draws.mixed)
UINT64 = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize("sigma", [0.001, 0.05, 0.3, 1.0, 2.0])
def test_factors_are_lognormal_and_their_mean_is_exactly_one(sigma: float) -> None:
    factors = draws.lognormal_factors(sigma)
    assert sum(map(Fraction, factors.tolist())) == len(factors) == 2**16
    assert (np.diff(factors) >= 0).all()
    assert factors[0] > 0
    logarithm = np.log(factors)
    assert logarithm.std() == pytest.approx(sigma, rel=2e-3)
    assert np.median(factors) == pytest.approx(np.exp(-(sigma**2) / 2), rel=5e-3)


@given(numbers=st.lists(UINT64, min_size=1, max_size=20))
def test_the_kernel_mixes_as_numpy_does(numbers: list[int]) -> None:
    array = np.array(numbers, dtype=np.uint64)
    assert draws.mixed(array).tolist() == [int(COMPILED(np.uint64(number))) for number in numbers]


def test_mixing_is_the_finalizer_of_splitmix64() -> None:
    """Its first outputs from seed 1234567, as published with the generator: mix(seed + n * golden ratio)."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    states = np.uint64(1234567) + np.arange(1, 4, dtype=np.uint64) * golden
    assert draws.mixed(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_all_rows_of_a_table_are_drawn_about_equally_often() -> None:
    key = draws.step_key(3, 1)
    tasks = np.arange(2**20, dtype=np.uint64)
    bits = draws.mixed(draws.with_task(draws.mixed(draws.with_draw(key, np.uint64([5]))), tasks))
    counts = np.bincount(draws.table_row(bits).astype(np.int64), minlength=2**16)
    chi_square = float(((counts - 16.0) ** 2 / 16).sum())
    assert abs(chi_square - 2**16) < 5 * (2 * 2**16) ** 0.5
    chance = draws.chance(draws.mixed(draws.for_chance(bits))).astype(np.float64) / 2**53
    assert chance.mean() == pytest.approx(0.5, abs=2e-3)
    assert abs(float(np.corrcoef(chance, draws.table_row(bits).astype(float))[0, 1])) < 5e-3


def test_steps_and_seeds_draw_differently() -> None:
    keys = {int(draws.step_key(seed, step)) for seed in range(50) for step in range(20)}
    assert len(keys) == 1000


@given(duration=st.integers(0, 2**52), factor=st.floats(0.01, 100))
def test_a_longer_duration_is_rounded_up_to_whole_nanoseconds(duration: int, factor: float) -> None:
    longer = Fraction(int(draws.longer_ns(np.array([duration]), np.array([factor]))[0]))
    exact = Fraction(duration) * Fraction(factor)
    assert -exact / 10**13 <= longer - exact < 1 + exact / 10**13


def test_float_noise_is_no_further_nanosecond() -> None:
    assert draws.longer_ns(np.array([10]), np.array([1.1])).tolist() == [11.0]

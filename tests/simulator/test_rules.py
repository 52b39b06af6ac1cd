from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from simulator import rules


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, 0),
        (1e-9, 1),
        (1.1e-6, 1100),
        (1.0000000001e-9, 2),
        (0.1e-9, 1),
        (1.0, 10**9),
        (86_400.0, 86_400 * 10**9),
    ],
)
def test_seconds_become_whole_ns_rounded_up_without_float_noise(seconds, expected):
    assert rules.duration_ns(seconds) == expected


@given(time_ns=st.integers(0, 10**12))
def test_a_whole_number_of_ns_survives_the_way_through_seconds(time_ns):
    assert rules.duration_ns(time_ns / 1e9) == time_ns


@given(seconds=st.floats(0, 1e6))
def test_nothing_ends_earlier_than_its_price_but_for_float_noise(seconds):
    assert rules.duration_ns(seconds) >= seconds * 1e9 * (1 - 1e-13)
    assert rules.duration_ns(seconds) <= math.ceil(seconds * 1e9)


def test_times_are_refused_beyond_two_to_the_62():
    assert rules.within_range(2**62)
    assert not rules.within_range(2**62 * 1.001)
    assert not rules.within_range(-1)
    assert not rules.within_range(math.nan)


def test_a_host_bound_task_ends_when_its_last_kernel_is_launched():
    assert rules.compute_end_ns(10, 5, 40) == 40
    assert rules.compute_end_ns(10, 50, 40) == 60


def test_an_eager_receive_waits_for_the_bytes_but_a_late_one_does_not_pay_twice():
    assert rules.eager_recv_end_ns(0, 3, 10) == 10
    assert rules.eager_recv_end_ns(0, 25, 10) == 25


@pytest.mark.parametrize(
    ("rule", "arguments"),
    [
        (rules.duration_ns, (1.1e-6,)),
        (rules.compute_end_ns, (10, 5, 40)),
        (rules.eager_recv_end_ns, (0, 25, 10)),
        (rules.collective_start_ns, (3, 9)),
    ],
)
def test_rules_give_the_same_answer_when_numba_compiles_them(rule, arguments):
    assert njit(rule)(*arguments) == rule(*arguments)

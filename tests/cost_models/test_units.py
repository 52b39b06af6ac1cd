"""Quantities with units, both ways."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.errors import CostModelError
from cost_models.units import Dimension, format_bytes, format_duration, parse_quantity


def parse(value, dimension, **options):
    return parse_quantity(value, dimension, where="file.yaml", field="key", **options)


@pytest.mark.parametrize(
    ("text", "dimension", "expected"),
    [
        ("80GiB", Dimension.BYTES, 80 * 2**30),
        ("80GB", Dimension.BYTES, 80e9),
        ("512 KiB", Dimension.BYTES, 524288),
        ("12B", Dimension.BYTES, 12),
        (1024, Dimension.BYTES, 1024),
        ("400Gb/s", Dimension.BYTES_PER_S, 50e9),
        ("3.35TB/s", Dimension.BYTES_PER_S, 3.35e12),
        ("1GiB/s", Dimension.BYTES_PER_S, 2**30),
        ("28us", Dimension.SECONDS, 28e-6),
        ("1.5ms", Dimension.SECONDS, 1.5e-3),
        ("2e-6", Dimension.SECONDS, 2e-6),
        ("989.4TFLOP/s", Dimension.FLOPS_PER_S, 989.4e12),
        ("2PFLOP/s", Dimension.FLOPS_PER_S, 2e15),
    ],
)
def test_text_becomes_a_number_in_the_base_unit(text, dimension, expected):
    assert parse(text, dimension) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    "value", [0, -1, "-3GiB", "0GB", math.nan, math.inf, True, None, [1], "fast", "", "nanGiB"]
)
def test_what_is_no_positive_quantity_is_refused_with_an_example(value):
    with pytest.raises(CostModelError) as caught:
        parse(value, Dimension.BYTES)
    assert caught.value.where == "file.yaml"
    assert caught.value.field == "key"
    assert "80GiB" in caught.value.fix


def test_zero_is_accepted_only_where_asked_for():
    assert parse("0us", Dimension.SECONDS, zero_ok=True) == 0
    with pytest.raises(CostModelError, match=">= 0"):
        parse("-1us", Dimension.SECONDS, zero_ok=True)


@pytest.mark.parametrize(
    ("text", "dimension", "hint"),
    [
        ("80Gib", Dimension.BYTES, "'GiB'"),
        ("28us", Dimension.BYTES, "80GiB"),
        ("400Gb", Dimension.BYTES_PER_S, "'Gb/s'"),
        ("989TFLOPS", Dimension.FLOPS_PER_S, "'TFLOP/s'"),
    ],
)
def test_a_unit_that_does_not_fit_gets_a_hint(text, dimension, hint):
    with pytest.raises(CostModelError) as caught:
        parse(text, dimension)
    assert "does not fit" in caught.value.rule
    assert hint in caught.value.fix


@given(st.integers(1, 2**50))
def test_whole_bytes_survive_the_trip_through_text(size):
    assert parse(f"{size}B", Dimension.BYTES) == size


def test_sizes_are_shown_in_binary_units():
    shown = [format_bytes(size) for size in (0, 1023, 1024, 3 * 2**20, 79.1 * 2**30, 2**41)]
    assert shown == ["0 B", "1023 B", "1.00 KiB", "3.00 MiB", "79.10 GiB", "2.00 TiB"]


def test_times_are_shown_with_four_digits():
    shown = [format_duration(time_s) for time_s in (0, 3e-9, 28e-6, 5.6e-3, 0.1234567, 12.345, 98765.4)]
    assert shown == ["0 s", "3.000 ns", "28.00 us", "5.600 ms", "123.5 ms", "12.35 s", "98765 s"]

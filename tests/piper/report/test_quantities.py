"""Numbers as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper.report.quantities import format_count, format_duration, format_gib, format_ranges, format_share

DURATIONS = [
    (0.0, "0 s"), (3.2e-9, "3.20 ns"), (3.2e-6, "3.20 us"), (0.01234, "12.3 ms"), (8.314, "8.31 s"),
    (125.0, "125 s"), (7200.0, "2.00 h"), (3 * 86400.0, "3.00 days"),
]  # fmt: skip
SIZES = [
    (0, "0 GiB"),
    (512, "0.50 KiB"),
    (3 * 2**20, "3.00 MiB"),
    (2**30, "1.00 GiB"),
    (79 * 2**30, "79.0 GiB"),
]
COUNTS = [
    (12, "12.0"),
    (7_890, "7.89 k"),
    (505_000, "505 k"),
    (8_030_261_248, "8.03 B"),
    (2 * 10**12, "2.00 T"),
]


@pytest.mark.parametrize(("seconds", "text"), DURATIONS)
def test_durations_have_three_digits_and_a_unit(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("size_bytes", "text"), SIZES)
def test_sizes_are_in_powers_of_two(size_bytes: int, text: str) -> None:
    assert format_gib(size_bytes) == text


@pytest.mark.parametrize(("count", "text"), COUNTS)
def test_counts_are_in_powers_of_ten(count: int, text: str) -> None:
    assert format_count(count) == text


def test_shares_are_percent() -> None:
    assert format_share(0.3814) == "38.1 %"


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 3, 8], "0-3, 8"), ([1, 5], "1, 5")]
)
def test_ranges_are_short(numbers: list[int], text: str) -> None:
    assert format_ranges(numbers) == text


@given(st.lists(st.integers(0, 200), unique=True).map(sorted))
def test_ranges_name_exactly_their_numbers(numbers: list[int]) -> None:
    named: list[int] = []
    for part in filter(None, format_ranges(numbers).split(", ")):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == numbers


@given(st.floats(1e-9, 1e7))
def test_a_duration_reads_back_to_one_percent(seconds: float) -> None:
    value, unit = format_duration(seconds).split()
    scale = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "h": 3600.0, "days": 86400.0}[unit]
    assert float(value.replace(",", "")) * scale == pytest.approx(seconds, rel=0.01)

"""Numbers as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper.report.quantities import format_count, format_ranges, format_share

COUNTS = [
    (12, "12.0"),
    (7_890, "7.89 k"),
    (505_000, "505 k"),
    (8_030_261_248, "8.03 B"),
    (2 * 10**12, "2.00 T"),
]


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

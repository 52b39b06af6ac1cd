"""Rows must have every forward, and every backward whole or as both halves, once."""

from __future__ import annotations

import pytest

from piper.errors import StrategyError
from tests.facts import ONE, rows
from tests.graphs import after, placed, transformer


def check(row: str) -> None:
    graph = placed(transformer(layers=1), stages=ONE, axes={}, rows=rows(row))
    after(graph, "check_order")


def test_whole_and_split_backwards_stand_side_by_side() -> None:
    check("0F0 0F1 0B0 0BI1 0BW1")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0F0 0F1 0B0", "0B1.*is missing"),
        ("0F0 0F1 0B0 0BI1", "0BW1.*is missing"),
        ("0F0 0F1 0B0 0BW1 0BI1", "0BW1.*stands before its 0BI1"),
        ("0F0 0F1 0B0 0B1 0BI1 0BW1", "0B1.*stands beside its halves"),
        ("0F0 0F1 0B0 0B1 0B1", "0B1.*stands twice"),
        ("0F0 0F1 0B0 0B1 1F0", "1F0.*is not a task of this pipeline rank"),
    ],
)
def test_a_wrong_row_is_refused_by_task(row: str, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        check(row)

"""Rows must have every forward, and every backward whole or as both halves, once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piper.errors import StrategyError
from piper.passes.check_order import CheckOrder
from simulator.plan import TaskKind
from tests.facts import ONE, TWO, rows
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


BORDERS = ((TaskKind.F, 3), (TaskKind.B, 5), (TaskKind.B, 7), (TaskKind.BW, 5))


def check_parts(row: str) -> None:
    graph = placed(transformer(layers=1), stages=ONE, axes={}, rows=rows(row), row_borders=BORDERS)
    CheckOrder().apply(replace(graph, row_lines=("s.json:4",)))


def test_whole_passes_and_passes_in_parts_stand_side_by_side() -> None:
    check_parts("0F0/0 0F1 0F0/3 0BI0/7 0B1 0BI0/5 0BW0/5 0BI0/0 0BW0/0")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0F0/0 0F1 0B0 0B1", r"s\.json:4: task = '0F0/3' is missing"),
        ("0F0/3 0F0/0 0F1 0B0 0B1", "0F0/3.*stands before 0F0/0, whose results it needs"),
        ("0F0 0F1 0B0/7 0B0/0 0B0/5 0B1", "0B0/0.*stands before 0B0/5"),
        ("0F0 0F1 0B1 0BI0 0BW0/0", "0BW0/5.*is missing"),
        ("0F0 0F1 0B1 0BI0/7 0BW0 0BI0/5 0BI0/0", "0BW0.*stands before 0BI0/[05]"),
        ("0F0 0F0/0 0F0/3 0F1 0B0 0B1", "0F0'.*stands beside its parts"),
        ("0F0/0 0F0/3 0F0/3 0F1 0B0 0B1", "0F0/3.*stands twice"),
        ("0F0/0 0F0/2 0F0/3 0F1 0B0 0B1", "0F0/2.*is no part of its stage"),
    ],
)
def test_a_row_with_wrong_parts_is_refused_by_part(row: str, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        check_parts(row)


def both_ways(*texts: str) -> None:
    graph = placed(transformer(layers=1), stages=TWO, axes={"pp": 2}, rows=rows(*texts))
    after(graph, "check_order")


def test_stages_with_two_homes_take_half_of_the_microbatches_each() -> None:
    both_ways("0F0 1F1 1B1 0B0", "0F1 1F0 1B0 0B1")


def test_a_microbatch_that_changes_direction_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"1F1.*other direction"):
        both_ways("0F0 0F1 1F1 1B1 0B0 0B1", "0F2 1F0 1F2 1B0 1B2 0B2")

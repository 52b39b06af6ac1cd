"""Columns of whole numbers: their distinct rows, and how often a row came before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_MOST_CODES = 2**62
"""Rows are numbered by one int64 each, so that sums and products of what is below never overflow."""

_MOST_PLACES_PER_ROW = 16
"""A larger table costs more than sorting: measured, 94,000 rows, 0.9 ms against 6 ms by sorting."""


def distinct_rows(columns: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Return the distinct rows of equally long columns, in order of first appearance.

    Returns:
        Where each distinct row appears first, int64 [distinct], rising; and the number of every row,
        int64 [rows].
    """
    code, span = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns if len(code) else ():
        low, width = int(column.min()), int(column.max()) - int(column.min()) + 1
        if span * width > _MOST_CODES:
            (code, span), (column, width) = _dense(code), _dense(column)
            low = 0
        code, span = code * width + (column - low), span * width
    first, number = _first_and_number(code, span)
    order = np.argsort(first)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return first[order], rank[number]


def occurrence(number: Ints) -> Ints:
    """Return for every row how many earlier rows have the same number, int64 [rows]."""
    order = np.argsort(number, kind="stable")
    ordered = number[order]
    new = np.concatenate([np.ones(min(len(number), 1), dtype=np.bool_), ordered[1:] != ordered[:-1]])
    starts = np.flatnonzero(new)
    found = np.empty(len(number), dtype=np.int64)
    found[order] = np.arange(len(number)) - np.repeat(starts, np.diff(starts, append=len(number)))
    return found


def _first_and_number(code: Ints, span: int) -> tuple[Ints, Ints]:
    """Return where each distinct code in 0..span - 1 appears first, and the number of every code, rising.

    Few possible codes are counted in a table, which is several times as fast as sorting.
    """
    if span > _MOST_PLACES_PER_ROW * len(code):
        _, first, number = np.unique(code, return_index=True, return_inverse=True)
        return first, number
    place = np.full(span, len(code), dtype=np.int64)
    place[code[::-1]] = np.arange(len(code) - 1, -1, -1)  # of equal codes the last assignment holds
    values = np.flatnonzero(place < len(code))
    rank = np.zeros(span, dtype=np.int64)
    rank[values] = np.arange(len(values))
    return place[values], rank[code]


def _dense(column: Ints) -> tuple[Ints, int]:
    values, inverse = np.unique(column, return_inverse=True)
    return inverse, len(values)

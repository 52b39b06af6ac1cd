"""A family of captures: all captures of a model over a domain, as one JSON object with polynomials in it.

[Note: families]
Captures at a few sizes must agree in everything but numbers; each number that varies becomes a polynomial
(`piper.capture.polynomial`), tried at more points than it has coefficients. What is a choice at each size is
left open until a size is asked for: equal kernels are joined then, and the peak of a pass is the highest of
its moments then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from piper.capture.codec import FORMAT, PASSES
from piper.capture.peak import peak_of
from piper.capture.polynomial import Fit, NotPolynomialError, Point, never_below, value_at

Leaf = Callable[[tuple[int, ...]], Any]
"""Returns what stands for the values of one number at all points."""


def joined(captures: Sequence[dict[str, Any]], fit: Fit) -> dict[str, Any]:
    """Return the family that captures belong to.

    Args:
        captures: `to_json` with details, at the points of `fit`: a pass lists its kernels one by one and its
            moments.
        fit: finds the polynomials.
    Raises: NotPolynomialError where they have no family.
    """
    numbers = _Numbers(fit)
    operations = _JoinedTable(captures, "operations", lambda rows: _zipped(rows, numbers.leaf))

    def a_pass(rows: tuple[Any, ...]) -> Any:
        kernels, moments = _same_length([row[0] for row in rows]), [row[1] for row in rows]
        return [[operations.number(numbers) for numbers in kernels], _zipped(moments, numbers.leaf)]

    passes = _JoinedTable(captures, "passes", a_pass)

    def a_body(rows: tuple[Any, ...]) -> Any:
        count = len(PASSES)
        kept = [passes.number(numbers) for numbers in zip(*(row[:count] for row in rows), strict=True)]
        return [*kept, *_zipped([row[count:] for row in rows], numbers.leaf)]

    bodies = _JoinedTable(captures, "bodies", a_body)
    segments = [
        [bodies.number(tuple(row[0] for row in rows)), *_equal([row[1:] for row in rows])]
        for rows in _same_length([capture["segments"] for capture in captures])
    ]
    family = {
        "format": FORMAT,
        **{name: _equal([capture[name] for capture in captures])
           for name in ("facts", "parameters", "buffer_bytes", "dtype")},
        "operations": operations.rows,
        "passes": [[kernels, _undominated(moments, numbers)] for kernels, moments in passes.rows],
        "bodies": bodies.rows,
        "segments": segments,
    }  # fmt: skip
    return family | {"terms": [list(term) for term in fit.terms], "polynomials": numbers.polynomials}


def member(family: dict[str, Any], point: Point) -> dict[str, Any]:
    """Return one capture of a family as `codec.from_json` reads it.

    Raises: NotPolynomialError where a number is not whole: the point lies outside of the family; KeyError,
        TypeError or ValueError for anything but a family.
    """
    values = value_at(family["polynomials"], family["terms"], point)

    def filled(row: Any) -> Any:
        if isinstance(row, list):
            return [filled(item) for item in row]
        return values[row["p"]] if isinstance(row, dict) else row

    passes = [[kernels, *peak_of(filled(moments))] for kernels, moments in family["passes"]]
    return family | {
        "operations": filled(family["operations"]),
        "passes": passes,
        "bodies": filled(family["bodies"]),
        "micro_batch": point[0],
        "seq_len": point[1],
    }


class _Numbers:
    """The polynomials of a family; a leaf is a number, or the place of its polynomial."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self._place: dict[tuple[int, ...], int] = {}
        self.polynomials: list[tuple[int, ...]] = []

    def leaf(self, values: tuple[int, ...]) -> Any:
        """Return what stands for a number."""
        if len(set(values)) == 1:
            return values[0]
        found = self._fit.of(values)
        if found not in self._place:
            self._place[found] = len(self.polynomials)
            self.polynomials.append(found)
        return {"p": self._place[found]}

    def coefficients(self, leaf: Any) -> tuple[int, ...]:
        """Return the polynomial of a leaf."""
        if isinstance(leaf, dict):
            return self.polynomials[leaf["p"]]
        return (1, leaf, *(0 for _ in self._fit.terms[1:]))


class _JoinedTable:
    """Numbers rows that stand at the same place in all captures."""

    def __init__(
        self, captures: Sequence[dict[str, Any]], name: str, joined_row: Callable[[tuple[Any, ...]], Any]
    ) -> None:
        self._tables = [capture[name] for capture in captures]
        self._joined_row = joined_row
        self._number: dict[tuple[int, ...], int] = {}
        self.rows: list[Any] = []

    def number(self, numbers: tuple[int, ...]) -> int:
        """Return the number of the row whose rows in the captures have these numbers."""
        if numbers not in self._number:
            rows = tuple(table[n] for table, n in zip(self._tables, numbers, strict=True))
            row = self._joined_row(rows)
            self._number[numbers] = len(self.rows)
            self.rows.append(row)
        return self._number[numbers]


def _zipped(items: Sequence[Any], leaf: Leaf) -> Any:
    """Return one tree in place of equal trees whose numbers vary."""
    first = items[0]
    if isinstance(first, list | tuple):
        return [_zipped(parts, leaf) for parts in _same_length(items)]
    if type(first) is int and all(type(item) is int for item in items):
        return leaf(tuple(items))
    return _equal(items)


def _same_length(items: Sequence[Any]) -> list[tuple[Any, ...]]:
    if any(not isinstance(item, list | tuple) or len(item) != len(items[0]) for item in items):
        raise NotPolynomialError
    return list(zip(*items, strict=True))


def _equal(items: Sequence[Any]) -> Any:
    if any(item != items[0] for item in items):
        raise NotPolynomialError
    return items[0]


def _undominated(moments: Sequence[Any], numbers: _Numbers) -> list[Any]:
    """Leave out moments that are never the highest one; of equals the first stays."""
    tops = [numbers.coefficients(alive) for alive, _ in moments]
    kept: list[int] = []
    for i, top in enumerate(tops):
        if any(never_below(tops[k], top) for k in kept):
            continue
        # A later moment replaces an equal one only where it is higher everywhere.
        kept = [k for k in kept if not never_below(top, tops[k])]
        kept.append(i)
    return [moments[i] for i in kept]

"""Exact polynomials in the sizes of a microbatch, found from their values at a few sizes.

What capture counts (dimensions, FLOPs, bytes) is a polynomial in the sequences b of a microbatch and the
tokens s of a sequence: 1, s, s^2, b, bs, bs^2 with rational coefficients. As many points as there are terms
give the coefficients; further points check them.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

Point = tuple[int, int]
"""(micro_batch, seq_len)."""

Terms = tuple[Point, ...]
"""Exponents of b and s."""

IN_BOTH: Terms = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))
"""Terms of a quantity over both sizes."""

IN_LENGTH: Terms = ((0, 0), (0, 1), (0, 2))
"""Terms of a quantity at one microbatch."""

IN_BATCH: Terms = ((0, 0), (1, 0))
"""Terms of a quantity at one sequence length."""


class NotPolynomialError(Exception):
    """A quantity that no such polynomial gives: the caller captures every size on its own."""


class Fit:
    """Finds polynomials through values at `points`; the first `len(terms)` points must determine them.

    Args:
        terms: `IN_BOTH`, `IN_LENGTH` or `IN_BATCH`.
        points: where values are known; those after the first `len(terms)` are checks.
    """

    def __init__(self, terms: Terms, points: Sequence[Point]) -> None:
        self.terms = terms
        self._rows = [_powers(terms, point) for point in points]
        self._inverse, self._denominator = _inverse(self._rows[: len(terms)])
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def of(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Return (denominator, coefficients...) of the polynomial with these values at the points.

        Raises: NotPolynomialError where there is none.
        """
        if values not in self._known:
            self._known[values] = self._found(values)
        return self._known[values]

    def _found(self, values: tuple[int, ...]) -> tuple[int, ...]:
        count = len(self.terms)
        tops = [sum(a * y for a, y in zip(row, values[:count], strict=True)) for row in self._inverse]
        fractions = [Fraction(top, self._denominator) for top in tops]
        bottom = lcm(*(fraction.denominator for fraction in fractions))
        found = (bottom, *(int(fraction * bottom) for fraction in fractions))
        if any(_sum(found, row) != value * bottom for row, value in zip(self._rows, values, strict=True)):
            raise NotPolynomialError
        return found


def value_at(polynomials: Sequence[Sequence[int]], terms: Sequence[Sequence[int]], point: Point) -> list[int]:
    """Return the values of polynomials at a point.

    Args:
        polynomials: from `Fit.of`.
        terms: of the fit.
    Raises: NotPolynomialError where one is no whole number.
    """
    powers = _powers(terms, point)
    values = []
    for polynomial in polynomials:
        value, rest = divmod(_sum(polynomial, powers), polynomial[0])
        if rest:
            raise NotPolynomialError
        values.append(value)
    return values


def never_below(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether no coefficient of `one` is below that of `other`, so that no value is (sizes >= 1)."""
    pairs = zip(one[1:], other[1:], strict=True)
    return all(mine * other[0] >= theirs * one[0] for mine, theirs in pairs)


def _powers(terms: Sequence[Sequence[int]], point: Point) -> list[int]:
    micro_batch, seq_len = point
    return [micro_batch**i * seq_len**j for i, j in terms]


def _sum(polynomial: Sequence[int], powers: Sequence[int]) -> int:
    return sum(c * power for c, power in zip(polynomial[1:], powers, strict=True))


def _inverse(rows: Sequence[Sequence[int]]) -> tuple[list[list[int]], int]:
    """Return the inverse of a square matrix as whole numbers over one denominator (Gauss-Jordan)."""
    size = len(rows)
    work = [
        [Fraction(x) for x in row] + [Fraction(int(i == j)) for j in range(size)]
        for i, row in enumerate(rows)
    ]
    for column in range(size):
        pivot = next(i for i in range(column, size) if work[i][column])
        work[column], work[pivot] = work[pivot], work[column]
        work[column] = [x / work[column][column] for x in work[column]]
        for i in range(size):
            if i != column and work[i][column]:
                factor = work[i][column]
                work[i] = [x - factor * y for x, y in zip(work[i], work[column], strict=True)]
    inverse = [row[size:] for row in work]
    denominator = lcm(*(x.denominator for row in inverse for x in row))
    return [[int(x * denominator) for x in row] for row in inverse], denominator

"""Exact polynomials in both sizes of a microbatch: found from few values, refused where there are none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper.capture.polynomial import (
    IN_BATCH,
    IN_BOTH,
    IN_LENGTH,
    Fit,
    NotPolynomialError,
    never_below,
    value_at,
)

GRID = [(b, s) for s in (13, 64, 29) for b in (2, 3)]
CHECKS = [(1, 29), (257, 29), (2, 41)]
NUMBER = st.integers(-(2**60), 2**60)


def value(coefficients, point):
    return sum(c * point[0] ** i * point[1] ** j for c, (i, j) in zip(coefficients, IN_BOTH, strict=True))


@given(st.lists(NUMBER, min_size=6, max_size=6), st.integers(1, 2**12), st.integers(1, 2**20))
def test_whole_coefficients_are_found_exactly_however_large(coefficients, micro_batch, seq_len):
    fit = Fit(IN_BOTH, [*GRID, *CHECKS])
    found = fit.of(tuple(value(coefficients, point) for point in [*GRID, *CHECKS]))
    assert found == (1, *coefficients)
    assert value_at([found], IN_BOTH, (micro_batch, seq_len)) == [value(coefficients, (micro_batch, seq_len))]


def test_half_coefficients_give_whole_numbers_as_causal_scores_do():
    fit = Fit(IN_LENGTH, [(1, 13), (1, 64), (1, 29), (1, 41)])
    found = fit.of(tuple(s * (s + 1) // 2 for s in (13, 64, 29, 41)))
    assert found == (2, 0, 1, 1)
    assert value_at([found], IN_LENGTH, (1, 1000)) == [500500]


def test_one_length_has_a_line_over_microbatches():
    assert Fit(IN_BATCH, [(2, 8), (3, 8), (257, 8)]).of((21, 31, 2571)) == (1, 1, 10)


@pytest.mark.parametrize(
    "bent",
    [
        pytest.param(lambda b, s: b * min(s, 40), id="a window"),
        pytest.param(lambda b, s: -(-s // 32) * 32, id="tiles"),
        pytest.param(lambda b, s: b * s // 3, id="a floor"),
        pytest.param(lambda b, s: b * b * s, id="a square of the microbatch"),
        pytest.param(lambda b, s: s**3, id="a cube"),
        pytest.param(lambda b, s: max(b, 2), id="a microbatch of one apart"),
    ],
)
def test_what_is_no_polynomial_is_refused(bent):
    with pytest.raises(NotPolynomialError):
        Fit(IN_BOTH, [*GRID, *CHECKS]).of(tuple(bent(b, s) for b, s in [*GRID, *CHECKS]))


def test_a_value_that_is_not_whole_is_refused():
    with pytest.raises(NotPolynomialError):
        value_at([(2, 0, 1, 0)], IN_LENGTH, (1, 3))


@given(st.tuples(NUMBER, NUMBER, NUMBER), st.tuples(NUMBER, NUMBER, NUMBER), st.integers(1, 2**20))
def test_what_is_never_below_is_not_below_anywhere(one, other, seq_len):
    if never_below((1, *one), (2, *other)):
        top, bottom = (sum(c * seq_len**j for j, c in enumerate(part)) for part in (one, other))
        assert 2 * top >= bottom

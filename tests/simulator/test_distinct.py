import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from simulator.distinct import distinct_rows, occurrence

numbers = st.integers(-3, 3) | st.integers(-(2**62), 2**62)
tables = st.integers(1, 5).flatmap(lambda width: st.lists(st.tuples(*[numbers] * width), max_size=40))


def columns_of(rows):
    return [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)]


@given(rows=tables.filter(bool))
def test_distinct_rows_are_numbered_in_order_of_first_appearance(rows):
    first, number = distinct_rows(columns_of(rows))
    distinct = list(dict.fromkeys(rows))
    assert [rows[position] for position in first.tolist()] == distinct
    assert first.tolist() == [rows.index(row) for row in distinct]
    assert number.tolist() == [distinct.index(row) for row in rows]


@given(values=st.lists(st.integers(-5, 5), max_size=40))
def test_an_occurrence_counts_equal_rows_before(values):
    found = occurrence(np.array(values, dtype=np.int64)).tolist()
    assert found == [values[:position].count(value) for position, value in enumerate(values)]


def test_columns_without_rows_have_no_distinct_ones():
    empty = np.zeros(0, dtype=np.int64)
    first, number = distinct_rows([empty, empty])
    assert len(first) == len(number) == len(occurrence(empty)) == 0

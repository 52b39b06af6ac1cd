"""Over which sequence lengths one law is looked for, and where it is tried."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper.capture.domain import MAX_STEP, NUM_LENGTHS, Domain, domains_of, one_length


def test_a_usual_length_shares_its_domain_with_all_multiples_of_a_tile_up_to_the_context():
    assert domains_of(8192, context_length=131072)[0] == Domain(low=128, high=131072, step=128)


def test_a_length_that_fills_no_tile_is_looked_for_among_finer_multiples():
    assert [domain.step for domain in domains_of(1000, context_length=4096)] == [8, 4, 2, 1, 1]


def test_a_window_parts_the_lengths_that_it_cuts_from_those_that_it_does_not():
    windowed = {"context_length": 32768, "breaks": (4096,)}
    assert domains_of(4096, **windowed)[0] == Domain(low=128, high=4096, step=128)
    assert domains_of(8192, **windowed)[0] == Domain(low=4224, high=32768, step=128)


@pytest.mark.parametrize(
    ("seq_len", "context"),
    [
        pytest.param(8192, None, id="a model of unknown context"),
        pytest.param(8193, 8192, id="longer than the context"),
        pytest.param(1, 8192, id="a single token"),
        pytest.param(12, 8192, id="as short as other sizes"),
        pytest.param(16, 17, id="a context with too few lengths"),
    ],
)
def test_other_lengths_stand_alone(seq_len, context):
    assert domains_of(seq_len, context_length=context) == (one_length(seq_len),)


@given(st.integers(1, 2**21), st.integers(1, 2**21), st.lists(st.integers(1, 2**20), max_size=3))
def test_every_domain_holds_its_length_and_is_tried_at_both_ends(seq_len, context, breaks):
    *wide, alone = domains_of(seq_len, context_length=context, breaks=breaks)
    assert alone == one_length(seq_len)
    for domain in wide:
        lengths = domain.lengths(seq_len)
        assert len(set(lengths)) == NUM_LENGTHS
        assert lengths[-1] == seq_len
        assert {domain.low, domain.high} <= set(lengths)
        assert all(length in domain for length in lengths)
        assert domain.high <= context
        assert domain.step <= MAX_STEP
        assert not any(domain.low <= size < domain.high for size in breaks)


def test_a_finer_domain_holds_the_lengths_of_a_coarser_one():
    coarse, *finer, _ = domains_of(1024, context_length=4096)
    assert all(length in domain for domain in finer for length in range(coarse.low, coarse.high + 1, 128))

"""The default cut of the contract, and what cannot be cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper.errors import StrategyError
from piper.graph import Units, default_cut, stages_of_segments, units_of
from tests.models import captured


def llama_units(layers: int) -> Units:
    return Units(of_segment=tuple(range(layers + 2)), before=1, layers=layers, after=1)


def test_layers_that_divide_evenly_keep_embedding_and_head_on_the_ends() -> None:
    assert default_cut(llama_units(32), 4) == (9, 8, 8, 9)


def test_when_only_all_units_divide_embedding_and_head_count_one_each() -> None:
    assert default_cut(llama_units(126), 16) == (8,) * 16
    assert default_cut(llama_units(126), 128) == (1,) * 128


def test_otherwise_the_middle_stages_take_the_larger_counts_earlier_first() -> None:
    assert default_cut(llama_units(5), 4) == (2, 2, 2, 1)
    assert default_cut(llama_units(8), 3) == (3, 4, 3)
    assert default_cut(llama_units(7), 5) == (2, 2, 2, 2, 1)


def test_a_model_without_layer_tags_counts_every_unit_as_a_layer() -> None:
    assert default_cut(Units(of_segment=(0, 1, 2, 3), before=0, layers=4, after=0), 4) == (1, 1, 1, 1)


def test_more_stages_than_units_names_layers_and_limit() -> None:
    with pytest.raises(StrategyError) as caught:
        default_cut(llama_units(4), 7)
    assert caught.value.value == 7
    assert "4 layers + 2" in caught.value.rule
    assert "at most 6" in caught.value.fix


@given(layers=st.integers(1, 130), stages=st.integers(1, 132))
def test_every_unit_goes_somewhere_and_counts_differ_as_little_as_promised(layers: int, stages: int) -> None:
    units = llama_units(layers)
    if stages > units.count:
        return
    counts = default_cut(units, stages)
    assert sum(counts) == units.count
    assert len(counts) == stages
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= (2 if layers % stages == 0 else 1)
    cut = stages_of_segments(units, counts)
    assert list(cut) == sorted(cut)


def test_units_of_a_captured_model_are_its_pp_scopes() -> None:
    units = units_of(captured(layers=3))
    assert (units.before, units.layers, units.after) == (1, 3, 1)
    assert units.of_segment == (0, 1, 2, 3, 4)

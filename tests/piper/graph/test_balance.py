"""Balanced cuts: the busiest pipeline rank has least to do."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from piper.graph import balanced_cut


def loads_of_stages(loads: list[int], counts: tuple[int, ...]) -> list[int]:
    firsts = [sum(counts[:stage]) for stage in range(len(counts))]
    return [sum(loads[first : first + count]) for first, count in zip(firsts, counts, strict=True)]


def all_cuts(units: int, stages: int) -> list[tuple[int, ...]]:
    borders = combinations(range(1, units), stages - 1)
    return [tuple(b - a for a, b in zip((0, *cut), (*cut, units), strict=True)) for cut in borders]


@given(loads=st.lists(st.integers(0, 50), min_size=1, max_size=9), data=st.data())
def test_no_cut_has_a_smaller_largest_stage(loads: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(loads)))
    counts = balanced_cut(loads, range(stages))
    assert sum(counts) == len(loads)
    assert min(counts) > 0
    best = min(max(loads_of_stages(loads, cut)) for cut in all_cuts(len(loads), stages))
    assert max(loads_of_stages(loads, counts)) == best


def test_a_heavy_head_takes_fewer_layers_with_it() -> None:
    assert balanced_cut([0, *[4] * 16, 12], [0, 1, 2, 3]) == (5, 5, 5, 3)


def test_ranks_of_a_v_are_balanced_not_their_stages() -> None:
    loads, ranks = [0, *[4] * 16, 12], [0, 1, 1, 0]
    counts = balanced_cut(loads, ranks)
    of_stage = loads_of_stages(loads, counts)
    assert max(of_stage[0] + of_stage[3], of_stage[1] + of_stage[2]) == 40, "of 76, in pieces of 4"

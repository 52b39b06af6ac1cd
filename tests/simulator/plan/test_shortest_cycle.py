"""The cycle that is shown is as short as any, and the search does not slow down on long chains."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from simulator.plan.checks.shortest_cycle import Digraph


def graph(count: int, edges: list[tuple[int, int]]) -> Digraph:
    table = np.array(edges, dtype=np.int64).reshape(len(edges), 2)
    return Digraph(count=count, sources=table[:, 0], targets=table[:, 1])


def shortest_length(count: int, edges: list[tuple[int, int]]) -> int | None:
    """Powers of the adjacency matrix: the first with a one on its diagonal."""
    adjacent = np.zeros((count, count), dtype=bool)
    for source, target in edges:
        adjacent[source, target] = True
    reached = adjacent
    for length in range(1, count + 1):
        if reached.diagonal().any():
            return length
        reached = reached @ adjacent
    return None


@given(
    edges=st.integers(1, 12).flatmap(
        lambda n: st.tuples(
            st.just(n), st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=40)
        )
    )
)
def test_no_cycle_is_shorter_than_the_one_that_is_found(edges):
    count, pairs = edges
    cycle = graph(count, pairs).shortest_cycle()
    assert len(cycle) == (shortest_length(count, pairs) or 0)
    for node, after in zip(cycle, [*cycle[1:], *cycle[:1]], strict=True):
        assert (node, after) in pairs


def test_a_short_cycle_beside_a_long_one_is_preferred():
    long = [(i, (i + 1) % 1000) for i in range(1000)]
    assert sorted(graph(1002, [*long, (500, 1000), (1000, 1001), (1001, 500)]).shortest_cycle()) == [
        500,
        1000,
        1001,
    ]


def test_what_only_hangs_behind_a_cycle_is_unsorted_but_not_on_it():
    ring = graph(5, [(0, 1), (1, 0), (1, 2), (2, 3), (4, 0)])
    assert ring.unsorted().tolist() == [0, 1, 2, 3]
    assert sorted(ring.shortest_cycle()) == [0, 1]


def test_a_graph_without_cycles_has_none():
    assert graph(4, [(0, 1), (1, 2), (0, 2)]).shortest_cycle() == []

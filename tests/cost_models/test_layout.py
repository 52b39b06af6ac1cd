"""Where many sets of ranks lie is what `Cluster.spread` says of each."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import load_cluster
from cost_models.layout import Layout

CLUSTER = load_cluster("dgx-h100")


@st.composite
def sets(draw):
    order = draw(st.permutations(range(48)))
    members = draw(st.integers(1, 12))
    count = draw(st.integers(1, 48 // members))
    return np.array(order[: count * members]).reshape(count, members)


@given(members=sets())
def test_sets_lie_in_the_ways_that_each_of_them_lies(members):
    found = Layout(members, 8).spreads(shift=True)
    each = [CLUSTER.spread(row) for row in members.tolist()]
    assert len(found) == len(set(found))
    assert set(found) == set(each)


@given(members=sets())
def test_members_on_the_same_node_are_counted_for_each(members):
    here = Layout(members, 8).here.reshape(members.shape)
    for row, counts in zip(members.tolist(), here.tolist(), strict=True):
        nodes = [rank // 8 for rank in row]
        assert counts == [nodes.count(node) for node in nodes]


def test_the_ring_of_nodes_goes_by_their_numbers_and_closes():
    layout = Layout(np.array([[0, 9, 25, 24], [1, 2, 3, 4]]), 8)
    of, node, following = layout.neighbours(layout.num_nodes > 1)
    assert (of.tolist(), node.tolist(), following.tolist()) == ([0, 0, 0], [0, 1, 3], [1, 3, 0])


@pytest.mark.parametrize("num_ranks", [2**20, 2**40])
def test_ranks_may_be_far_apart(num_ranks):
    layout = Layout(np.array([[0, num_ranks - 1]]), 8)
    assert layout.num_nodes.tolist() == [2]

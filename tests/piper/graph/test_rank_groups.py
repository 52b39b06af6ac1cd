"""Which ranks talk to each other, for example with tp = 2, dp = 8, pp = 4 on 64 GPUs."""

from __future__ import annotations

from dataclasses import replace

from piper.graph import ExpertSharding, Graph, StageMesh
from piper.graph.rank_groups import (
    context_group,
    copies_group,
    expert_copies_group,
    expert_group,
    expert_replica_group,
    expert_shard_group,
    regrouping_group,
    replica_group,
    shard_group,
    tensor_group,
    tied_group,
)
from simulator.plan import Group
from tests.graphs import placed, transformer


def graph_on(**axes: int) -> Graph:
    stages = [i * axes["pp"] // 9 for i in range(9)]
    return placed(transformer(layers=1), stages=stages, axes=axes)


def covers(group: Group, ranks: range) -> bool:
    return sorted(rank for members in group.members for rank in members) == list(ranks)


def test_tensor_ranks_are_neighbours_and_replicas_are_two_apart() -> None:
    graph = graph_on(tp=2, dp=8, pp=4)
    assert tensor_group(graph, 1).members[:2] == ((16, 17), (18, 19))
    assert replica_group(graph, 1).members == (tuple(range(16, 32, 2)), tuple(range(17, 32, 2)))
    assert replica_group(graph, 1, partial=True).members == (tuple(range(16, 32)),)


def test_context_ranks_are_tp_apart_and_replicas_contain_them() -> None:
    graph = graph_on(tp=2, cp=2, dp=2, pp=1)
    assert context_group(graph, 0).members == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert replica_group(graph, 0).members == ((0, 2, 4, 6), (1, 3, 5, 7))


def test_hybrid_sharding_cuts_over_neighbouring_replicas_and_sums_over_the_others() -> None:
    graph = graph_on(tp=2, dp=8, pp=4)
    assert shard_group(graph, 0, shards=4).members[:2] == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert copies_group(graph, 0, shards=4).members[:2] == ((0, 8), (1, 9))
    assert copies_group(graph, 0, shards=4, partial=True).members[0] == (0, 1, 8, 9)


def test_experts_are_spread_over_dp_and_tp_and_each_exists_twice() -> None:
    graph, fact = graph_on(tp=2, dp=8, pp=4), ExpertSharding(segments=(6,), degree=8)
    owners, copies = expert_group(graph, 0, fact), expert_replica_group(graph, 0, fact)
    assert owners.members == (tuple(range(8)), tuple(range(8, 16)))
    assert copies.members == tuple((rank, rank + 8) for rank in range(8))
    assert (owners.axis, copies.axis) == ("ep", "dp")


def test_expert_state_is_cut_over_ranks_with_the_same_experts() -> None:
    graph, fact = graph_on(dp=8, pp=1), ExpertSharding(segments=(6,), degree=2)
    assert expert_shard_group(graph, 0, fact, shards=2).members == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert expert_copies_group(graph, 0, fact, shards=2).members == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_every_group_of_a_pipeline_rank_covers_its_ranks_once() -> None:
    graph, fact = graph_on(tp=2, cp=2, dp=4, pp=2), ExpertSharding(segments=(6,), degree=4, tensor_degree=2)
    for group in (
        tensor_group(graph, 1),
        context_group(graph, 1),
        replica_group(graph, 1),
        shard_group(graph, 1, shards=4),
        copies_group(graph, 1, shards=4),
        copies_group(graph, 1, shards=4, partial=True),
        expert_group(graph, 1, fact),
        expert_replica_group(graph, 1, fact),
    ):
        assert covers(group, range(16, 32)), group.name


def test_holders_of_a_shared_parameter_meet_replica_by_replica() -> None:
    assert tied_group(graph_on(tp=2, dp=2, pp=2), "tied0", (0, 1)).members == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_a_stage_with_a_mesh_of_its_own_counts_its_ranks_in_its_own_way() -> None:
    graph = graph_on(tp=1, dp=4, pp=2)
    other = StageMesh(segments=graph.segments_of_stage(1), axes=(("tp", 2), ("cp", 1), ("dp", 2)))
    graph = replace(graph, stage_meshes=(other,))
    assert replica_group(graph, 0).members == ((0, 1, 2, 3),)
    assert tensor_group(graph, 1).members == ((4, 5), (6, 7))


def test_ranks_that_regroup_are_neighbours_or_a_stride_apart() -> None:
    graph = graph_on(tp=2, dp=4, pp=2)
    assert regrouping_group(graph, 1, count=4, stride=1).members == ((8, 9, 10, 11), (12, 13, 14, 15))
    found = regrouping_group(graph, 0, count=2, stride=2)
    assert found.members == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert found.axis == "pp"

"""Folding: ranks that cannot be told apart are one unit, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.jitter.disturbance import tensor_parallel_groups
from simulator.jitter.units import folded, unfolded
from simulator.plan import Mesh
from tests.jitters import disturbance_of
from tests.plans import PlanBuilder


def three_axes():
    """Return a plan of tp=2, dp=3, pp=2 in which everybody meets in tp, dp and over the pipeline."""
    builder = PlanBuilder(pipeline_ranks=2, replicas=3, tp=2)
    for rank, device in enumerate(builder.devices):
        tp, dp = builder.group(f"tp{rank}", "tp", [rank]), builder.group(f"dp{rank}", "dp", [rank])
        device.compute("work", 10)
        device.task("tp", 9, "tp", group=tp, microbatch=0, phase=0, waits=["work"])
        device.task("dp", 9, "dp", group=dp, bucket=device.bucket("d"), waits=["tp"])
    builder.transfer(0, 1)
    return builder.build()


def unit_lists(spec: str, plan) -> list[list[int]]:
    units = folded(plan, disturbance_of(spec, plan))
    return [units.ranks_of(unit) for unit in range(units.num_units)]


def test_without_jitter_all_ranks_of_a_device_plan_are_one_unit() -> None:
    assert unit_lists("", three_axes()) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]


def test_a_straggler_tells_apart_whom_it_meets_and_whom_they_meet() -> None:
    plan = three_axes()
    assert unit_lists("straggler:rank=2,factor=2", plan) == [
        [0, 4], [1, 5], [2], [3], [6, 10], [7, 11], [8], [9],
    ]  # fmt: skip


def test_a_whole_tensor_parallel_group_that_is_slow_stays_folded() -> None:
    plan = three_axes()
    assert unit_lists("straggler:rank=2-3,factor=2", plan) == [[0, 1, 4, 5], [2, 3], [6, 7, 10, 11], [8, 9]]


def test_noise_tells_tensor_parallel_groups_apart_or_every_rank() -> None:
    plan = three_axes()
    assert unit_lists("noise:sigma=0.1", plan) == [[first, first + 1] for first in range(0, 12, 2)]
    assert unit_lists("noise:sigma=0.1,per=rank", plan) == [[rank] for rank in range(12)]
    assert len(unit_lists("noise:sigma=0.1;straggler:rank=1,factor=2", plan)) == 12


def test_a_slow_link_matters_only_to_sets_that_leave_the_node() -> None:
    plan = three_axes()
    units = folded(plan, disturbance_of("link:node=1,factor=0.5", plan))
    by_group = [
        units.set_factor[a:b].tolist() for a, b in zip(units.set_starts, units.set_starts[1:], strict=False)
    ]
    assert by_group[0] == [1.0] * len(by_group[0])
    assert set(by_group[1]) == {2.0}
    assert set(by_group[3]) == {1.0}


def test_a_healthy_factor_folds_as_if_nothing_were_said() -> None:
    plan = three_axes()
    assert unit_lists("straggler:rank=3,factor=1", plan) == unit_lists("", plan)


@pytest.mark.parametrize("spec", ["", "straggler:rank=2,factor=2", "noise:sigma=0.1"])
def test_sets_of_units_hold_every_rank_of_a_group_once(spec: str) -> None:
    plan = three_axes()
    units = folded(plan, disturbance_of(spec, plan))
    for number, group in enumerate(plan.groups):
        ranks = np.array(group.members)
        found = units.set_of[number][units.of_rank[ranks]]
        assert (found == found[:, :1]).all()
        for chosen in found[:, 0]:
            first, last = units.member_starts[chosen : chosen + 2]
            assert units.member_ranks[first:last].sum() == group.size


def test_unfolded_every_rank_is_a_unit_and_knows_its_peers() -> None:
    plan = three_axes()
    units = unfolded(plan, disturbance_of("", plan))
    assert units.num_units == 12
    assert units.peer[:6, 1].tolist() == [plan.peer_rank(rank, 1) for rank in range(6)]
    assert units.peer[6:, 0].tolist() == [plan.peer_rank(rank, 0) for rank in range(6, 12)]


def test_tensor_parallel_groups_follow_the_mesh_of_a_device_plan() -> None:
    plan = three_axes()
    assert tensor_parallel_groups(plan).tolist() == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10]
    object.__setattr__(plan.device_plans[1], "mesh", Mesh(axes=(("dp", 2), ("tp", 3))))
    assert tensor_parallel_groups(plan).tolist()[6:] == [6, 7, 6, 7, 6, 7]

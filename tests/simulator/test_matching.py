from __future__ import annotations

import pytest

from simulator import build_workload
from simulator.errors import IllegalPlanError
from simulator.matching import match_tasks
from simulator.plan import NONE, TaskKind
from tests.plans import FakeCostModel, PlanBuilder, one_f_one_b_rows, pipeline_plan

K = TaskKind


def violations(builder):
    with pytest.raises(IllegalPlanError) as caught:
        build_workload(builder.build(), FakeCostModel())
    return caught.value.violations


def test_every_send_of_a_pipeline_meets_the_receive_of_its_microbatch_and_back():
    plan = pipeline_plan(one_f_one_b_rows(4, 6))
    matching = match_tasks(plan)
    codes = [code for device in plan.device_plans for code in device.codes()]
    pairs = {
        (codes[task], codes[matching.partner[task]]) for task in range(len(codes)) if matching.is_send[task]
    }
    expected = {(f"{s}SEND_F{m}", f"{s + 1}RECV_F{m}") for s in range(3) for m in range(6)}
    expected |= {(f"{s + 1}SEND_B{m}", f"{s}RECV_B{m}") for s in range(3) for m in range(6)}
    assert pairs == expected
    joined = matching.partner != NONE
    assert (matching.partner[matching.partner[joined]] == joined.nonzero()[0]).all()


def test_a_send_without_a_receive_and_a_receive_without_a_send_are_named():
    builder = PlanBuilder(pipeline_ranks=2)
    builder.devices[0].task("s", K.SEND_F, "s", peer=1, edge=0, microbatch=3, size_bytes=1)
    builder.devices[1].task("r", K.RECV_F, "r", peer=0, edge=0, microbatch=4, size_bytes=1)
    assert violations(builder) == (
        "0SEND_F3 of pipeline rank 0 is never received",
        "1RECV_F4 of pipeline rank 1 is never sent",
    )


def test_two_ends_that_disagree_about_the_bytes_are_named_with_both_sizes():
    builder = PlanBuilder(pipeline_ranks=2)
    builder.devices[0].task("s", K.SEND_F, "s", peer=1, edge=0, microbatch=0, size_bytes=8)
    builder.devices[1].task("r", K.RECV_F, "r", peer=0, edge=0, microbatch=0, size_bytes=4)
    assert violations(builder) == (
        "0SEND_F0 of pipeline rank 0 (8 bytes) and 1RECV_F0 of pipeline rank 1 (4 bytes) "
        "disagree about the size",
    )


def test_a_rank_that_never_joins_its_collective_is_named():
    builder = PlanBuilder(pipeline_ranks=2)
    world = builder.group("world", "dp", [0, 1])
    builder.devices[0].task("n", K.ALL_REDUCE, "dp", stage=NONE, group=world)
    builder.devices[1].compute("f", 1, microbatch=0)
    assert violations(builder) == ("pipeline rank 1 never joins ALL_REDUCE@norm of pipeline rank 0",)


def test_a_rank_outside_the_group_and_a_collective_without_a_group_are_named():
    builder = PlanBuilder(pipeline_ranks=2)
    alone = builder.group("dp0", "dp", [0])
    for device in builder.devices:
        device.task("n", K.ALL_REDUCE, "dp", stage=NONE, group=alone)
    builder.devices[0].task("m", K.ALL_REDUCE, "dp", stage=NONE, group=NONE)
    assert violations(builder) == (
        "ALL_REDUCE@norm of pipeline rank 1 does not belong to the group that it names",
        "ALL_REDUCE of pipeline rank 0 does not belong to the group that it names",
    )


def test_equal_collectives_of_a_step_meet_in_order_of_occurrence():
    builder = PlanBuilder(pipeline_ranks=2)
    world = builder.group("world", "dp", [0, 1])
    for device in builder.devices:
        for number in range(3):
            device.task(f"{number}", K.ALL_REDUCE, "dp", stage=NONE, group=world)
    assert match_tasks(builder.build()).members.to_rows() == [[0, 3], [1, 4], [2, 5]]

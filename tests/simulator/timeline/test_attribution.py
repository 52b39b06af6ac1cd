"""Each label on a plan where its nanoseconds can be counted by hand."""

from __future__ import annotations

import pytest

from cost_models.errors import InternalError
from simulator import simulate
from simulator.plan import NONE, TaskKind
from simulator.timeline.attribution import Label, Phase, attribute
from tests.plans import Costs, FakeCostModel, PlanBuilder, one_f_one_b_rows, pipeline_plan

K = TaskKind


def labels(builder, steps=1, **prices):
    """Return, by track, the ns of every label that occurs."""
    plan = builder.build()
    found = attribute(plan, simulate(plan, FakeCostModel(**prices), steps=steps))
    return [{Label(i).name.lower(): ns for i, ns in enumerate(row) if ns} for row in found.label_ns.tolist()]


def test_compute_recompute_and_optimizer_are_told_apart_by_kind():
    builder = PlanBuilder()
    for kind, time_ns in ((K.F, 1), (K.B, 2), (K.BI, 4), (K.BW, 8), (K.R, 16), (K.NORM, 32), (K.UPDATE, 64)):
        builder.devices[0].compute(kind.name, time_ns, kind, microbatch=0)
    assert labels(builder) == [{"compute": 15, "recompute": 16, "optimizer": 96}]


def test_a_receive_is_exposed_only_while_it_is_on_the_wire_and_bubble_before():
    builder = PlanBuilder(pipeline_ranks=2)
    builder.devices[0].compute("a", 10, microbatch=0)
    builder.transfer(0, 1, sent_after=["a"])
    builder.devices[1].compute("b", 5, microbatch=0, waits=["recv x"])
    assert labels(builder, transfer_ns=lambda *_: 7) == [
        {"compute": 10, "bubble": 12},
        {"compute": 5, "exposed_pp": 7, "bubble": 10},
    ]


def test_communication_under_compute_is_not_exposed():
    builder = PlanBuilder(pipeline_ranks=2)
    builder.devices[0].compute("a", 10, microbatch=0)
    builder.transfer(0, 1, sent_after=["a"])
    builder.devices[1].compute("c", 20, microbatch=1)
    builder.devices[1].compute("b", 5, microbatch=0, waits=["recv x"])
    assert labels(builder, transfer_ns=lambda *_: 7)[1] == {"compute": 25}


def test_communication_that_the_next_task_does_not_wait_for_is_bubble():
    builder = PlanBuilder(pipeline_ranks=2)
    builder.devices[0].compute("a", 10, microbatch=0)
    builder.transfer(0, 1, sent_after=["a"])
    device = builder.devices[1]
    device.task(
        "ungated", K.ALL_GATHER, "dp", group=builder.group("dp1", "dp", [1]), bucket=device.bucket("w")
    )
    device.compute("b", 5, microbatch=0, waits=["recv x"])
    assert labels(builder, collective_ns=lambda *_: 9)[1] == {"compute": 5, "bubble": 10}


@pytest.mark.parametrize("axis", ["tp", "dp", "pp", "ep", "cp"])
def test_a_collective_is_exposed_under_the_axis_of_its_group(axis):
    builder = PlanBuilder(pipeline_ranks=1)
    device = builder.devices[0]
    device.task("c", K.ALL_TO_ALL, "c", group=builder.group("g", axis, [0]), bucket=device.bucket("x"))
    device.compute("f", 5, microbatch=0, waits=["c"])
    assert labels(builder, collective_ns=lambda *_: 9) == [{"compute": 5, f"exposed_{axis}": 9}]


def test_the_gradient_norm_counts_as_data_parallel_whatever_its_group():
    builder = PlanBuilder()
    device = builder.devices[0]
    device.task("n", K.ALL_REDUCE, "dp", stage=NONE, group=builder.group("world", "pp", [0]))
    device.compute("u", 5, K.UPDATE, waits=["n"])
    assert labels(builder, collective_ns=lambda *_: 9) == [{"optimizer": 5, "exposed_dp": 9}]


def test_an_unknown_axis_is_our_own_fault():
    builder = PlanBuilder()
    device = builder.devices[0]
    device.task("n", K.ALL_REDUCE, "dp", group=builder.group("g", "zz", [0]), bucket=device.bucket("x"))
    with pytest.raises(InternalError, match="unknown axis 'zz'"):
        labels(builder)


def test_waiting_in_a_collective_for_a_later_rank_is_straggler_then_exposed():
    builder = PlanBuilder(pipeline_ranks=2)
    world = builder.group("world", "dp", [0, 1])
    for device, busy in zip(builder.devices, (10, 40), strict=True):
        device.compute("b", busy, K.B, microbatch=0)
        device.task("n", K.ALL_REDUCE, "dp", stage=NONE, group=world, waits=["b"])
        device.compute("u", 3, K.UPDATE, waits=["n"])
    assert labels(builder, collective_ns=lambda *_: 6) == [
        {"compute": 10, "straggler": 30, "exposed_dp": 6, "optimizer": 3},
        {"compute": 40, "exposed_dp": 6, "optimizer": 3},
    ]


def test_communication_waited_for_through_other_communication_is_exposed():
    """The reduce-scatter runs first on the stream of the tied all-reduce that the update waits for."""
    builder = PlanBuilder()
    device = builder.devices[0]
    device.compute("b", 10, K.B, microbatch=0)
    dp, tied = builder.group("dp0", "dp", [0]), builder.group("tied0", "pp", [0])
    bucket = device.bucket("d")
    device.task("rs", K.REDUCE_SCATTER, "dp", group=dp, bucket=bucket, size_bytes=7, waits=["b"])
    device.task("ar", K.ALL_REDUCE, "dp", group=tied, bucket=bucket, size_bytes=4, waits=["b"])
    device.compute("u", 1, K.UPDATE, waits=["ar"])
    prices = {"collective_ns": lambda kind, size, ranks: size}
    assert labels(builder, **prices) == [{"compute": 10, "exposed_dp": 7, "exposed_pp": 4, "optimizer": 1}]


def test_of_two_communications_on_the_wire_the_one_that_ends_last_counts():
    builder = PlanBuilder()
    device = builder.devices[0]
    bucket = device.bucket("d")
    for name, size in (("tp", 5), ("ep", 9)):
        device.task(name, K.ALL_TO_ALL, name, group=builder.group(name, name, [0]), bucket=bucket,
                    size_bytes=size)  # fmt: skip
    device.compute("f", 1, microbatch=0, waits=["tp", "ep"])
    prices = {"collective_ns": lambda kind, size, ranks: size}
    assert labels(builder, **prices) == [{"compute": 1, "exposed_ep": 9}]


def test_host_is_the_time_in_which_the_next_task_is_not_dispatched():
    builder = PlanBuilder()
    for microbatch in range(3):
        builder.devices[0].compute(f"{microbatch}", 1, microbatch=microbatch)
    assert labels(builder, launch_ns=40) == [{"compute": 3, "host": 118}]


def test_communication_comes_before_host_where_both_explain_the_same_instant():
    builder = PlanBuilder()
    device = builder.devices[0]
    device.task("c", K.ALL_GATHER, "dp", group=builder.group("g", "dp", [0]), bucket=device.bucket("x"))
    device.compute("f", 5, microbatch=0, waits=["c"])
    assert labels(builder, launch_ns=10, collective_ns=lambda *_: 4) == [
        {"compute": 5, "host": 16, "exposed_dp": 4}
    ]


def test_after_the_last_task_the_gather_that_the_next_step_waits_for_is_exposed():
    builder = PlanBuilder()
    device = builder.devices[0]
    device.compute("f", 10, microbatch=0, previous_step_waits=["gather"])
    group = builder.group("dp0", "dp", [0])
    device.task("gather", K.ALL_GATHER, "dp", group=group, bucket=device.bucket("w"), waits=["f"])
    for steps in (1, 2):
        assert labels(builder, steps, collective_ns=lambda *_: 25) == [{"compute": 10, "exposed_dp": 25}]


def test_a_rank_without_compute_is_all_bubble():
    builder = PlanBuilder(pipeline_ranks=2)
    builder.devices[0].compute("a", 10, microbatch=0)
    builder.transfer(0, 1, sent_after=["a"])
    assert labels(builder, transfer_ns=lambda *_: 7)[1] == {"bubble": 17}


def test_the_window_is_the_last_period_on_all_ranks():
    plan = pipeline_plan(
        one_f_one_b_rows(4, 8), costs=Costs(forward_ns=5, backward_ns=9, update_ns=2), clip=True
    )
    timeline = simulate(plan, FakeCostModel(collective_ns=lambda *_: 3), steps=3)
    found = attribute(plan, timeline)
    ends = timeline.step_end_ns.tolist()
    assert (found.begin_ns, found.end_ns) == (ends[1], ends[2])
    assert (found.label_ns.sum(axis=1) == ends[2] - ends[1]).all()
    assert found.busy_ns().tolist() == [8 * 14 + 4] * 4


def test_means_weigh_every_track_by_its_ranks():
    builder = PlanBuilder(pipeline_ranks=2, replicas=8)
    builder.devices[0].compute("a", 10, microbatch=0)
    builder.devices[1].compute("b", 4, microbatch=0)
    plan = builder.build()
    found = attribute(plan, simulate(plan, FakeCostModel(), steps=1))
    assert found.n_devices.tolist() == [8, 8]
    assert found.breakdown_s()["compute"] == 7e-9
    assert found.mean_s(Label.COMPUTE, Label.BUBBLE) == 1e-8


def test_a_copy_from_the_host_is_exposed_while_the_next_task_waits_for_it():
    builder = PlanBuilder()
    device = builder.devices[0]
    device.task("in", K.RELOAD, "host", microbatch=0, phase=K.B, size_bytes=9)
    device.compute("f", 5, microbatch=1)
    device.task("out", K.OFFLOAD, "host", microbatch=1, phase=K.F, size_bytes=50, waits=["f"])
    device.compute("b", 2, K.B, microbatch=0, waits=["in"])
    found = labels(builder, host_copy_ns=lambda size: size)
    assert found == [{"compute": 7, "exposed_offload": 4, "bubble": 57 - 9}]


def test_exchanges_of_every_axis_within_one_pass_are_told_apart():
    builder = PlanBuilder()
    device = builder.devices[0]
    before = []
    for number, axis in enumerate(("tp", "cp", "ep")):
        group = builder.group(f"{axis}0", axis, [0])
        kind = {"tp": K.ALL_GATHER, "cp": K.RING_SHIFT, "ep": K.ALL_TO_ALL}[axis]
        device.task(axis, kind, axis, microbatch=0, phase=K.F, part=number, group=group,
                    size_bytes=10**number, waits=before)  # fmt: skip
        device.compute(f"f{number}", 1, microbatch=0, part=number, waits=[axis])
        before = [f"f{number}"]
    assert labels(builder, collective_ns=lambda kind, size, ranks: size) == [
        {"compute": 3, "exposed_tp": 1, "exposed_cp": 10, "exposed_ep": 100}
    ]


def test_delayed_weight_gradients_and_gradients_of_inputs_are_compute():
    builder = PlanBuilder()
    device = builder.devices[0]
    device.compute("bi", 4, K.BI, microbatch=0)
    device.compute("bw", 8, K.BW, microbatch=0)
    assert labels(builder) == [{"compute": 12}]


def phases(plan, steps=1, **prices):
    found = attribute(plan, simulate(plan, FakeCostModel(**prices), steps=steps))
    assert (found.bubble_ns.sum(axis=1) == found.label_ns[:, Label.BUBBLE]).all()
    return found.bubble_ns.tolist()


def test_the_bubble_of_1f1b_is_warm_up_before_the_first_backward_and_cool_down_after_the_last_forward():
    """rank 0: F F . . B B F B B . B B, rank 1: . F B B F B B F B B . ., one letter per ns."""
    plan = pipeline_plan(one_f_one_b_rows(2, 3), costs=Costs(forward_ns=1, backward_ns=2))
    assert phases(plan) == [[2, 0, 1], [1, 0, 2]]


def test_what_a_rank_idles_in_a_settled_window_before_its_first_forward_is_warm_up():
    plan = pipeline_plan(one_f_one_b_rows(2, 3), costs=Costs(forward_ns=1, backward_ns=2))
    assert phases(plan, steps=3) == phases(plan)


def test_bubble_before_the_only_backward_is_warm_up_though_no_forward_follows():
    plan = pipeline_plan(one_f_one_b_rows(2, 1), costs=Costs(forward_ns=1, backward_ns=2))
    assert phases(plan) == [[3, 0, 0], [1, 0, 2]]


def test_messages_that_take_time_stall_forwards_and_backwards_that_alternate():
    plan = pipeline_plan(one_f_one_b_rows(2, 4), costs=Costs(forward_ns=3, backward_ns=1))
    assert [row[Phase.STEADY] for row in phases(plan)] == [0, 0]
    assert sum(row[Phase.STEADY] for row in phases(plan, transfer_ns=lambda *_: 2)) > 0

"""One story per rule: who ran when, as (rank, stream, code, start_ns, end_ns)."""

from __future__ import annotations

import pytest

from simulator import simulate
from simulator.errors import IllegalPlanError
from simulator.plan import NONE, TaskKind
from tests.plans import FakeCostModel, PlanBuilder

K = TaskKind


def rows(builder, steps=1, **prices):
    return simulate(builder.build(), FakeCostModel(**prices), steps=steps).rows()


def test_streams_run_their_own_tasks_in_order_and_wait_for_each_other_only_where_asked():
    builder = PlanBuilder()
    device = builder.devices[0]
    device.compute("a", 10, microbatch=0)
    device.task("c", K.ALL_REDUCE, "dp", group=builder.group("dp0", "dp", [0]), bucket=device.bucket("d"))
    device.compute("b", 5, microbatch=1, waits=["c"])
    device.compute("d", 1, microbatch=2)
    assert rows(builder, collective_ns=lambda *_: 30) == [
        (0, "compute", "0F0", 0, 10),
        (0, "dp", "0ALL_REDUCE@d", 0, 30),
        (0, "compute", "0F1", 30, 35),
        (0, "compute", "0F2", 35, 36),
    ]


def test_the_host_launches_one_task_after_another_and_starves_a_fast_device():
    builder = PlanBuilder()
    builder.devices[0].compute("slow", 100, microbatch=0)
    builder.devices[0].compute("short", 1, microbatch=1)
    builder.devices[0].compute("shorter", 2, microbatch=2)
    timeline = simulate(builder.build(), FakeCostModel(launch_ns=40), steps=1)
    assert timeline.rows() == [
        (0, "compute", "0F0", 40, 140),
        (0, "compute", "0F1", 140, 141),
        (0, "compute", "0F2", 141, 143),
    ]
    assert timeline.tracks[0].dispatch_ns.tolist() == [40, 80, 120]
    late = PlanBuilder()
    for microbatch in range(3):
        late.devices[0].compute(f"{microbatch}", 1, microbatch=microbatch)
    assert [row[3] for row in rows(late, launch_ns=40)] == [40, 80, 120]


def test_a_task_of_many_kernels_starts_with_its_first_and_ends_no_earlier_than_its_last_launch():
    builder = PlanBuilder()
    builder.devices[0].compute("many", 1, microbatch=0, kernels=10)
    builder.devices[0].compute("next", 7, microbatch=1)
    timeline = simulate(builder.build(), FakeCostModel(launch_ns=20), steps=1)
    assert timeline.rows() == [(0, "compute", "0F0", 20, 200), (0, "compute", "0F1", 220, 227)]
    assert timeline.tracks[0].ready_ns.tolist() == [0, 200]


def test_a_rendezvous_send_holds_its_stream_until_the_receive_is_there():
    builder = PlanBuilder(pipeline_ranks=2)
    builder.devices[1].compute("busy", 50, microbatch=9)
    builder.transfer(0, 1, received_after=["busy"])
    assert rows(builder, transfer_ns=lambda *_: 8) == [
        (1, "compute", "1F9", 0, 50),
        (0, "send>1", "0SEND_F0", 50, 58),
        (1, "recv<0", "1RECV_F0", 50, 58),
    ]


def test_an_eager_send_leaves_at_once_and_a_late_receive_finds_the_bytes_there():
    builder = PlanBuilder(pipeline_ranks=2)
    builder.devices[1].compute("busy", 50, microbatch=9)
    builder.transfer(0, 1, received_after=["busy"], size_bytes=64)
    assert rows(builder, transfer_ns=lambda *_: 8, eager_limit_bytes=64) == [
        (0, "send>1", "0SEND_F0", 0, 8),
        (1, "compute", "1F9", 0, 50),
        (1, "recv<0", "1RECV_F0", 50, 50),
    ]


def test_an_early_receive_of_an_eager_message_is_on_the_wire_with_the_send():
    builder = PlanBuilder(pipeline_ranks=2)
    builder.devices[0].compute("busy", 50, microbatch=9)
    builder.transfer(0, 1, sent_after=["busy"], size_bytes=64)
    assert rows(builder, transfer_ns=lambda *_: 8, eager_limit_bytes=64) == [
        (0, "compute", "0F9", 0, 50),
        (0, "send>1", "0SEND_F0", 50, 58),
        (1, "recv<0", "1RECV_F0", 50, 58),
    ]


def test_a_message_one_byte_above_the_eager_limit_waits_for_its_receive():
    builder = PlanBuilder(pipeline_ranks=2)
    builder.devices[1].compute("busy", 50, microbatch=9)
    builder.transfer(0, 1, received_after=["busy"], size_bytes=65)
    assert (0, "send>1", "0SEND_F0", 50, 58) in rows(builder, transfer_ns=lambda *_: 8, eager_limit_bytes=64)


def test_a_collective_starts_at_its_last_arrival_and_all_members_end_together():
    builder = PlanBuilder(pipeline_ranks=3)
    world = builder.group("world", "dp", [0, 1, 2])
    for rank, busy in enumerate([10, 70, 30]):
        device = builder.devices[rank]
        device.compute("busy", busy, microbatch=0)
        device.task("norm", K.ALL_REDUCE, "dp", stage=NONE, group=world, size_bytes=4, waits=["busy"])
    timeline = simulate(builder.build(), FakeCostModel(collective_ns=lambda *_: 5), steps=1)
    joined = [(row[2], row[3], row[4]) for row in timeline.rows() if row[1] == "dp"]
    assert joined == [("ALL_REDUCE@norm", 70, 75)] * 3
    assert [int(track.ready_ns[1]) for track in timeline.tracks] == [10, 70, 30]


def test_replicas_are_folded_so_their_collective_starts_when_the_device_joins():
    builder = PlanBuilder(replicas=16)
    device = builder.devices[0]
    device.compute("b", 10, K.B, microbatch=0)
    device.task("r", K.REDUCE_SCATTER, "dp", group=builder.group("dp0", "dp", [0]),
                bucket=device.bucket("dense0"), size_bytes=4, waits=["b"])  # fmt: skip
    assert rows(builder, collective_ns=lambda kind, size, ranks: len(ranks)) == [
        (0, "compute", "0B0", 0, 10),
        (0, "dp", "0REDUCE_SCATTER@dense0", 10, 26),
    ]


def test_a_step_waits_for_tasks_of_the_step_before_but_not_in_the_first_step():
    builder = PlanBuilder()
    device = builder.devices[0]
    device.compute("f", 10, microbatch=0, previous_step_waits=["gather"])
    group = builder.group("dp0", "dp", [0])
    device.task("gather", K.ALL_GATHER, "dp", group=group, bucket=device.bucket("w"), waits=["f"])
    timeline = simulate(builder.build(), FakeCostModel(collective_ns=lambda *_: 25), steps=2)
    assert timeline.rows() == [
        (0, "compute", "0F0", 0, 10),
        (0, "dp", "0ALL_GATHER@w", 10, 35),
        (0, "compute", "0F0", 35, 45),
        (0, "dp", "0ALL_GATHER@w", 45, 70),
    ]
    assert timeline.step_end_ns.tolist() == [35, 70]


def test_the_host_runs_ahead_into_the_next_step():
    builder = PlanBuilder()
    builder.devices[0].compute("f", 100, microbatch=0)
    timeline = simulate(builder.build(), FakeCostModel(launch_ns=30), steps=3)
    assert timeline.tracks[0].dispatch_ns.tolist() == [30, 60, 90]
    assert timeline.step_end_ns.tolist() == [130, 230, 330]


def test_crossed_rendezvous_sends_on_one_stream_hang_and_the_circle_is_named():
    builder = PlanBuilder(pipeline_ranks=2)
    zero, one = builder.devices
    shared = {"edge": 0, "microbatch": 0, "size_bytes": 1}
    zero.task("s", K.SEND_F, "p2p", peer=1, **shared)
    zero.task("r", K.RECV_B, "p2p", peer=1, **shared)
    one.task("s", K.SEND_B, "p2p", peer=0, **shared)
    one.task("r", K.RECV_F, "p2p", peer=0, **shared)
    with pytest.raises(IllegalPlanError) as caught:
        simulate(builder.build(), FakeCostModel(), steps=1)
    assert caught.value.exit_code == 4
    assert caught.value.violations == (
        "0SEND_F0 of pipeline rank 0 waits for 1RECV_F0 of pipeline rank 1 "
        "(queued behind 1SEND_B0 of pipeline rank 1)",
        "1SEND_B0 of pipeline rank 1 waits for 0RECV_B0 of pipeline rank 0 "
        "(queued behind 0SEND_F0 of pipeline rank 0)",
    )


def test_the_same_crossed_sends_pass_when_they_are_eager():
    builder = PlanBuilder(pipeline_ranks=2)
    zero, one = builder.devices
    shared = {"edge": 0, "microbatch": 0, "size_bytes": 1}
    zero.task("s", K.SEND_F, "p2p", peer=1, **shared)
    zero.task("r", K.RECV_B, "p2p", peer=1, **shared)
    one.task("s", K.SEND_B, "p2p", peer=0, **shared)
    one.task("r", K.RECV_F, "p2p", peer=0, **shared)
    assert rows(builder, eager_limit_bytes=1, transfer_ns=lambda *_: 4)[-1][4] == 4


def test_a_task_that_waits_for_one_queued_behind_it_is_reported():
    builder = PlanBuilder()
    builder.devices[0].compute("a", 1, microbatch=0)
    builder.devices[0].compute("b", 1, microbatch=1)
    builder.devices[0].wait_later("a", for_whom="b")
    with pytest.raises(IllegalPlanError, match="0F0 of pipeline rank 0 waits for 0F1 of pipeline rank 0"):
        simulate(builder.build(), FakeCostModel(), steps=1)


def test_collectives_issued_in_opposite_orders_hang_and_both_ranks_are_named():
    builder = PlanBuilder(pipeline_ranks=2)
    groups = [builder.group("a", "dp", [0, 1]), builder.group("b", "dp", [0, 1])]
    for device, order in zip(builder.devices, (groups, groups[::-1]), strict=True):
        for number, group in enumerate(order):
            device.task(f"{number}", K.ALL_REDUCE, "dp", stage=NONE, microbatch=group, group=group)
    with pytest.raises(IllegalPlanError) as caught:
        simulate(builder.build(), FakeCostModel(), steps=1)
    assert [line.split(" waits")[0] for line in caught.value.violations] == [
        "ALL_REDUCE0@norm of pipeline rank 0",
        "ALL_REDUCE1@norm of pipeline rank 1",
    ]


def test_copies_to_the_host_take_their_own_stream_and_a_reload_keeps_its_pass_waiting():
    builder = PlanBuilder()
    device = builder.devices[0]
    device.compute("f", 10, microbatch=0)
    device.task("out", K.OFFLOAD, "host", microbatch=0, phase=K.F, size_bytes=4, waits=["f"])
    device.compute("f1", 10, microbatch=1)
    device.task("in", K.RELOAD, "host", microbatch=0, phase=K.B, size_bytes=4, waits=["out"])
    device.compute("b", 20, K.B, microbatch=0, waits=["in"])
    assert rows(builder, host_copy_ns=lambda size: 3 * size) == [
        (0, "compute", "0F0", 0, 10),
        (0, "compute", "0F1", 10, 20),
        (0, "host", "0OFFLOAD:F0", 10, 22),
        (0, "host", "0RELOAD:B0", 22, 34),
        (0, "compute", "0B0", 34, 54),
    ]


def test_a_copy_starts_once_its_host_has_launched_it():
    builder = PlanBuilder()
    for microbatch in range(2):
        builder.devices[0].task(f"{microbatch}", K.OFFLOAD, "host", microbatch=microbatch, phase=K.F)
    timeline = simulate(builder.build(), FakeCostModel(launch_ns=40, host_copy_ns=lambda size: 1), steps=1)
    assert [row[3:] for row in timeline.rows()] == [(40, 41), (80, 81)]
    assert timeline.tracks[0].ready_ns.tolist() == [0, 41]


def test_a_ring_shift_waits_for_its_last_member_and_lasts_equally_long_on_all():
    builder = PlanBuilder(pipeline_ranks=2)
    ring = builder.group("ring", "cp", [0, 1])
    for device, busy in zip(builder.devices, (5, 8), strict=True):
        device.compute("f", busy, microbatch=0)
        device.task("s", K.RING_SHIFT, "cp", microbatch=0, phase=K.F, stage=0, group=ring, waits=["f"])
    assert rows(builder, collective_ns=lambda *_: 4) == [
        (0, "compute", "0F0", 0, 5),
        (1, "compute", "1F0", 0, 8),
        (0, "cp", "0RING_SHIFT:F0", 8, 12),
        (1, "cp", "0RING_SHIFT:F0", 8, 12),
    ]


def test_a_delayed_weight_gradient_fills_the_time_in_which_a_gradient_is_awaited():
    builder = PlanBuilder(pipeline_ranks=2)
    last, first = builder.devices[1], builder.devices[0]
    last.compute("bi", 5, K.BI, microbatch=0)
    builder.transfer(1, 0, kind=K.SEND_B, sent_after=["bi"])
    last.compute("bw", 6, K.BW, microbatch=0)
    first.compute("bi", 5, K.BI, microbatch=0, waits=["recv x"])
    assert rows(builder, transfer_ns=lambda *_: 2) == [
        (1, "compute", "1BI0", 0, 5),
        (0, "recv<1", "0RECV_B0", 5, 7),
        (1, "compute", "1BW0", 5, 11),
        (1, "send>0", "1SEND_B0", 5, 7),
        (0, "compute", "0BI0", 7, 12),
    ]

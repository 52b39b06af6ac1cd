from __future__ import annotations

import math

import pytest

from cost_models.errors import CostModelError
from cost_models.price import CollectiveKind, Price, Provenance
from simulator import build_workload
from simulator.errors import PlanError
from simulator.plan import NONE, TaskKind
from tests.plans import FakeCostModel, PlanBuilder, exact_price, one_f_one_b_rows, pipeline_plan

K = TaskKind


def test_tasks_lie_one_device_plan_after_another_with_global_numbers():
    builder = PlanBuilder(pipeline_ranks=2)
    builder.devices[0].compute("a", 1, microbatch=0)
    builder.transfer(0, 1, sent_after=["a"])
    builder.devices[1].compute("b", 2, microbatch=0, waits=["recv x"], previous_step_waits=["b"])
    work = build_workload(builder.build(), FakeCostModel())
    assert work.device_starts.tolist() == [0, 2, 4]
    assert work.codes == ("0F0", "0SEND_F0", "1RECV_F0", "1F0")
    assert work.stream.tolist() == [0, 1, 3, 2]
    assert work.waits.to_rows() == [[], [0], [], [2]]
    assert work.previous_step_waits.to_rows() == [[], [], [], [3]]
    assert work.partner.tolist() == [NONE, 2, 1, NONE]
    assert work.is_send.tolist() == [False, True, False, False]
    assert [work.device_of(task) for task in range(4)] == [0, 0, 1, 1]


def test_a_work_lasts_the_sum_of_its_kernels_and_costs_the_host_one_launch_each():
    builder = PlanBuilder()
    builder.devices[0].compute("a", 7, microbatch=0, kernels=5)
    builder.devices[0].task("nothing", K.UPDATE, "compute")
    work = build_workload(builder.build(), FakeCostModel(launch_ns=3))
    assert work.duration_ns.tolist() == [35, 0]
    assert work.launch_ns.tolist() == [3, 0]
    assert work.host_ns.tolist() == [15, 0]


def test_communication_costs_the_host_one_launch():
    builder = PlanBuilder(pipeline_ranks=2)
    builder.transfer(0, 1)
    work = build_workload(builder.build(), FakeCostModel(launch_ns=3, transfer_ns=lambda *_: 9))
    assert work.host_ns.tolist() == [3, 3]
    assert work.duration_ns.tolist() == [9, 9]


def test_messages_up_to_the_limit_are_eager_and_one_byte_more_is_not():
    builder = PlanBuilder(pipeline_ranks=2)
    builder.transfer(0, 1, name="small", microbatch=0, size_bytes=10)
    builder.transfer(0, 1, name="large", microbatch=1, size_bytes=11)
    work = build_workload(builder.build(), FakeCostModel(eager_limit_bytes=10))
    assert work.eager.tolist() == [True, False, True, False]


def test_each_distinct_operation_is_priced_once():
    model = FakeCostModel()
    build_workload(pipeline_plan(one_f_one_b_rows(4, 16)), model)
    operations = [question for question in model.asked if question[0] == "operation"]
    assert operations == [("operation", "1"), ("operation", "0")]


def test_a_transfer_takes_as_long_as_the_slowest_pair_of_replicas():
    builder = PlanBuilder(pipeline_ranks=2, replicas=4)
    builder.transfer(0, 1)
    model = FakeCostModel(transfer_ns=lambda size, source, target: 50 if (source, target) == (2, 6) else 10)
    assert build_workload(builder.build(), model).duration_ns.tolist() == [50, 50]
    pairs = {question[2:] for question in model.asked}
    assert pairs == {(0, 4), (1, 5), (2, 6), (3, 7)}


def test_a_collective_takes_as_long_as_its_slowest_set_of_ranks():
    builder = PlanBuilder(pipeline_ranks=2, replicas=3)
    tied = builder.group("tied0", "pp", [0, 1])
    for device in builder.devices:
        device.task("t", K.ALL_REDUCE, "dp", group=tied, bucket=device.bucket("tied0", kind="tied"))
    model = FakeCostModel(collective_ns=lambda kind, size, ranks: 10 * ranks[0] + len(ranks))
    assert build_workload(builder.build(), model).duration_ns.tolist() == [22, 22]
    assert {question[3] for question in model.asked} == {(0, 3), (1, 4), (2, 5)}


def test_of_replicas_that_lie_alike_one_is_priced():
    builder = PlanBuilder(pipeline_ranks=2, replicas=1000)
    for number in range(20):
        builder.transfer(0, 1, name=f"{number}", microbatch=number, size_bytes=number + 1)
    looked = []
    model = FakeCostModel(
        transfer_ns=lambda size, source, target: size * (1 + (source == 500)),
        distinct_sets=lambda members: looked.append(len(members)) or [members[0], members[500]],
    )
    work = build_workload(builder.build(), model)
    assert work.duration_ns[:20].tolist() == [2 * size for size in range(1, 21)]
    assert len(model.asked) == 20 * 2
    assert looked == [1000]


def test_every_kind_of_collective_is_priced_by_its_own_name():
    builder = PlanBuilder(replicas=2)
    device = builder.devices[0]
    bucket, group = device.bucket("d"), builder.group("dp0", "dp", [0])
    for kind in (K.ALL_REDUCE, K.ALL_GATHER, K.REDUCE_SCATTER, K.ALL_TO_ALL, K.RING_SHIFT):
        device.task(kind.name, kind, "dp", group=group, bucket=bucket, size_bytes=5)
    model = FakeCostModel()
    build_workload(builder.build(), model)
    assert model.asked == [("collective", kind, 5, (0, 1)) for kind in CollectiveKind]


@pytest.mark.parametrize(
    ("seconds", "low", "high"),
    [(math.nan, 0.0, 1.0), (-1.0, -1.0, 1.0), (math.inf, 0.0, math.inf), (1.0, 2.0, 3.0), (1.0, 0.0, 0.5)],
)
def test_a_price_that_is_no_number_or_outside_its_band_names_the_work(seconds, low, high):
    price = Price(seconds=seconds, low_s=low, high_s=high, provenance=Provenance.FITTED)

    class Broken(FakeCostModel):
        def operation(self, operation):
            return price

    builder = PlanBuilder()
    builder.devices[0].compute("a", 7, microbatch=0)
    with pytest.raises(CostModelError) as caught:
        build_workload(builder.build(), Broken())
    assert caught.value.where == "operation 7 of 1 x 7 ns"
    assert caught.value.field == "price"
    assert "hardware" in caught.value.fix


@pytest.mark.parametrize(
    ("price_ns", "tasks", "field"),
    [(2**62 + 2**12, 1, "time of a task"), (10**30, 1, "time of a task"), (2**61, 3, "total time")],
)
def test_a_step_beyond_two_to_the_62_ns_is_refused(price_ns, tasks, field):
    class Slow(FakeCostModel):
        def operation(self, operation):
            return exact_price(price_ns)

    builder = PlanBuilder()
    for microbatch in range(tasks):
        builder.devices[0].compute("a", 1, microbatch=microbatch)
    with pytest.raises(PlanError) as caught:
        build_workload(builder.build(), Slow())
    assert caught.value.field == field
    assert "seconds" in caught.value.fix


def test_a_launch_that_takes_longer_than_any_time_is_refused():
    class Stuck(FakeCostModel):
        launch_overhead_s = 1e308

    builder = PlanBuilder()
    builder.devices[0].compute("a", 1, microbatch=0)
    with pytest.raises(PlanError) as caught:
        build_workload(builder.build(), Stuck())
    assert caught.value.field == "time of a kernel launch"
    assert "units" in caught.value.fix


def test_copies_are_priced_once_per_size_and_direction_and_cost_the_host_one_launch():
    builder = PlanBuilder()
    device = builder.devices[0]
    for number, size in enumerate((5, 9, 5)):
        device.task(f"out{number}", K.OFFLOAD, "host", microbatch=number, phase=K.F, size_bytes=size)
        device.task(f"in{number}", K.RELOAD, "host", microbatch=number, phase=K.B, size_bytes=size)
    model = FakeCostModel(launch_ns=3, host_copy_ns=lambda size: 10 * size)
    work = build_workload(builder.build(), model)
    assert work.duration_ns.tolist() == [50, 50, 90, 90, 50, 50]
    assert work.host_ns.tolist() == [3] * 6
    assert work.is_host_copy.all()
    assert not work.is_compute.any()
    assert sorted(model.asked) == [("host_copy", size) for size in (5, 5, 9, 9)]  # a link for each way


def test_exchanges_of_one_size_within_passes_are_priced_once_per_group_whatever_their_number():
    builder = PlanBuilder(replicas=3, tp=2)
    device, tp = builder.devices[0], builder.group("tp0", "tp", [0])
    for microbatch in range(4):
        for part in range(5):
            for phase, kind in ((K.F, K.ALL_GATHER), (K.B, K.REDUCE_SCATTER)):
                device.task(f"{kind}{microbatch}{part}", kind, "tp", microbatch=microbatch, part=part,
                            phase=phase, group=tp, size_bytes=7)  # fmt: skip
    model = FakeCostModel(collective_ns=lambda kind, size, ranks: 1 + ranks[0])
    work = build_workload(builder.build(), model)
    assert work.duration_ns.tolist() == [5] * 40
    assert work.collective.tolist() == list(range(40))
    assert {question[3] for question in model.asked} == {(0, 1), (2, 3), (4, 5)}
    assert len(model.asked) == 2 * 3

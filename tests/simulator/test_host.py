"""What a host awaits: room in the queue of a stream, and the ends of what it blocks on."""

from __future__ import annotations

import pytest

from cost_models.catalogue import TASKS
from simulator import build_workload, simulate
from simulator.plan import TaskKind
from tests.plans import FakeCostModel, PlanBuilder


def three_long_computations(kernels: int = 3) -> PlanBuilder:
    builder = PlanBuilder(pipeline_ranks=1)
    for number in range(3):
        builder.devices[0].compute(f"c{number}", 100, microbatch=number, kernels=kernels)
    return builder


@pytest.mark.parametrize(
    ("limit", "awaited"),
    [
        # the task that runs counts as one kernel, those behind it as three, and one is to be launched
        (None, [[], [], []]),
        (1, [[-2], [-1], [0]]),
        (4, [[-2], [-1], [0]]),
        (5, [[-3], [-2], [-1]]),
        (7, [[-3], [-2], [-1]]),
        (8, [[], [-3], [-2]]),
        (100, [[], [], []]),
    ],
)
def test_a_host_awaits_what_makes_room_in_the_queue_of_the_stream(
    limit: int | None, awaited: list[list[int]]
) -> None:
    prices = FakeCostModel(launch_ns=1, run_ahead_kernels=limit)
    assert build_workload(three_long_computations().build(), prices).host_waits.to_rows() == awaited


def test_a_full_queue_delays_the_launch_until_there_is_room() -> None:
    prices = FakeCostModel(launch_ns=10, run_ahead_kernels=1)
    (track,) = simulate(three_long_computations().build(), prices, steps=1).tracks
    # kernels of 100 ns, three a task: [10, 310], [310, 610], and the last is launched from 310 on
    assert track.dispatch_ns.tolist() == [30, 60, 340]
    assert track.end_ns.tolist() == [310, 610, 910]


def test_streams_have_queues_of_their_own() -> None:
    builder = three_long_computations()
    group = builder.group("dp0", "dp", [0])
    builder.devices[0].bucket("d")
    for number in range(3):
        builder.devices[0].task(
            f"r{number}", TaskKind.ALL_REDUCE, "dp", group=group, bucket=0, microbatch=number
        )
    waits = build_workload(builder.build(), FakeCostModel(run_ahead_kernels=3)).host_waits.to_rows()
    assert waits == [[-5], [-4], [0], [-3], [-2], [-1]]


def test_after_a_blocking_task_nothing_is_launched_until_it_has_ended() -> None:
    prices = FakeCostModel(launch_ns=10, blocking=("f",))
    work = build_workload(three_long_computations(1).build(), prices)
    assert work.host_waits.to_rows() == [[-1], [0], [1]]
    (track,) = simulate(three_long_computations(1).build(), prices, steps=2).tracks
    assert track.start_ns.tolist() == [10, 120, 230, 340, 450, 560]


def test_before_a_task_that_needs_an_awaited_one_nothing_is_launched_until_that_has_ended() -> None:
    builder = PlanBuilder(pipeline_ranks=1)
    device = builder.devices[0]
    device.compute("a", 100, microbatch=0)
    device.task("copy", TaskKind.OFFLOAD, "host", microbatch=0, phase=TaskKind.F, size_bytes=40, waits=("a",))
    device.compute("b", 100, microbatch=1)
    device.compute("c", 100, microbatch=2, waits=("copy",))
    prices = FakeCostModel(launch_ns=10, awaited=("offload",), host_copy_ns=lambda size: 3 * size)
    work = build_workload(builder.build(), prices)
    assert work.host_waits.to_rows() == [[], [], [], [1]]
    (track,) = simulate(builder.build(), prices, steps=1).tracks
    # the copy runs [110, 230] beside b [110, 210]; c is launched only then, and costs its launch again
    assert track.start_ns.tolist() == [10, 110, 110, 240]


def test_a_host_that_awaits_what_cannot_end_is_part_of_the_report() -> None:
    builder = PlanBuilder(pipeline_ranks=2)
    builder.devices[0].compute("a", 1, microbatch=0)
    builder.devices[0].task("copy", TaskKind.OFFLOAD, "host", microbatch=0, phase=TaskKind.F, size_bytes=1)
    builder.devices[0].compute("b", 1, microbatch=1)
    builder.devices[0].wait_later("a", for_whom="b")
    builder.devices[1].compute("c", 1, microbatch=0)
    prices = FakeCostModel(blocking=("f",))
    with pytest.raises(Exception, match="waits for its host, which waits for 0F0 of pipeline rank 0"):
        simulate(builder.build(), prices, steps=1)


def test_stacks_block_on_kinds_of_tasks() -> None:
    assert {name.upper() for name in TASKS} == set(TaskKind.__members__)

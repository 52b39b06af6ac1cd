"""Every gradient arrives at its update once: per step, per microbatch, in two levels, from two copies."""

from dataclasses import replace

import numpy as np

from simulator.plan import NONE, Group, Mesh, Plan, Task, TaskKind
from simulator.plan.check import Violation, check_plan
from tests.simulator.plan.pipelines import change, drop, find, insert, pipeline_plan, tasks_of, with_tasks

SCATTER = "0REDUCE_SCATTER@dense0"


def found(plan: Plan) -> dict[str, Violation]:
    return {violation.rule: violation for violation in check_plan(plan)}


def per_microbatch(microbatches: int = 4) -> Plan:
    """Rank 0 reduces the gradients of each microbatch on their own, after its backward."""
    plan = pipeline_plan(1, microbatches, tied=False)
    stream = plan.device_plans[0].streams.index("dp")
    for microbatch in range(microbatches):
        task = Task(
            kind=TaskKind.REDUCE_SCATTER, stage=0, microbatch=microbatch, stream=stream, group=0, bucket=0,
            size_bytes=512,
        )  # fmt: skip
        plan = insert(plan, 0, task, after=f"0B{microbatch}", waits=(f"0B{microbatch}",))
    plan = drop(plan, 0, SCATTER)
    last = find(plan, 0, f"0REDUCE_SCATTER{microbatches - 1}@dense0")
    return change(plan, 0, "NORM", edit=lambda task: replace(task, waits=(last,)))


def test_one_reduction_per_microbatch_is_as_good_as_one_per_step():
    assert check_plan(per_microbatch()) == []


def test_a_microbatch_without_its_reduction_is_named():
    lost = found(drop(per_microbatch(), 0, "0REDUCE_SCATTER2@dense0"))
    assert lost["never-reduced"].tasks == ("rank 0: 0B2",)
    assert "never reduced with the gradients of rank 0: 0B2" in lost["never-reduced"].message


def test_a_microbatch_that_is_reduced_twice_is_named():
    plan = per_microbatch()
    twin = tasks_of(plan, 0)[find(plan, 0, "0REDUCE_SCATTER2@dense0")]
    twice = found(insert(plan, 0, twin, after="0REDUCE_SCATTER2@dense0", waits=("0B2",)))
    assert "0B2 more than once" in twice["reduced-twice"].message


def test_a_reduction_of_the_step_takes_what_the_microbatches_left():
    plan = drop(per_microbatch(), 0, "0REDUCE_SCATTER2@dense0")
    task = replace(tasks_of(plan, 0)[find(plan, 0, "0REDUCE_SCATTER3@dense0")], microbatch=NONE)
    step = insert(plan, 0, task, after="0REDUCE_SCATTER3@dense0", waits=("0B3",))
    norm = find(step, 0, "NORM")
    last = find(step, 0, SCATTER)
    step = change(step, 0, "NORM", edit=lambda t: replace(t, waits=(*t.waits, last)))
    assert norm > last
    assert check_plan(step) == []
    again = insert(step, 0, task, after=SCATTER, waits=("0B3",))
    assert "nothing is left" in found(again)["reduced-twice"].message


def test_a_reduction_takes_what_lies_in_the_buffer_that_it_reads():
    """Two microbatches add to one temporary buffer, whose reduction names only the second."""
    plan = drop(per_microbatch(), 0, "0REDUCE_SCATTER2@dense0")
    plan = with_buffer(plan, {"0B2": "allocates", "0B3": "reads", "0REDUCE_SCATTER3@dense0": "frees"})
    assert check_plan(plan) == []
    elsewhere = with_buffer(
        drop(per_microbatch(), 0, "0REDUCE_SCATTER2@dense0"),
        {"0B3": "allocates", "0REDUCE_SCATTER3@dense0": "frees"},
    )
    assert found(elsewhere)["never-reduced"].tasks == ("rank 0: 0B2",)


def with_buffer(plan: Plan, uses: dict[str, str]) -> Plan:
    """Add a temporary buffer of gradients that tasks allocate, read, or read and free."""
    device = plan.device_plans[0]
    table, number = device.buffers, len(device.buffers.size_bytes)

    buffers = replace(
        table,
        size_bytes=append(table.size_bytes, 512),
        memory_class=append(table.memory_class, 4),
        persistent=append(table.persistent, False),
        owner=append(table.owner, 0),
        microbatch=append(table.microbatch, -1),
    )
    plan = replace(plan, device_plans=(replace(device, buffers=buffers), *plan.device_plans[1:]))
    for code, use in uses.items():
        fields = ("reads", "frees") if use == "frees" else (use,)
        plan = change(
            plan, 0, code,
            edit=lambda t, fields=fields: replace(t, **{f: (*getattr(t, f), number) for f in fields}),
        )  # fmt: skip
    return plan


def append(column, value):
    return np.append(column, value).astype(column.dtype)


def hybrid(copies: tuple[tuple[int, ...], ...]) -> Plan:
    """Four replicas: shards over two ranks each, then their copies."""
    plan = pipeline_plan(1, 2, tied=False)
    shards = Group(name="shard0", axis="dp", pipeline_ranks=(0,), members=((0, 1), (2, 3)))
    across = Group(name="copy0", axis="dp", pipeline_ranks=(0,), members=copies)
    world = Group(name="world", axis="dp", pipeline_ranks=(0,), members=((0, 1, 2, 3),))
    training = replace(plan.training, global_batch=2 * plan.training.global_batch)
    mesh = Mesh(axes=(("dp", 4), ("pp", 1)))
    plan = replace(plan, groups=(shards, across, world), mesh=mesh, training=training)
    stream = plan.device_plans[0].streams.index("dp")
    second = Task(kind=TaskKind.ALL_REDUCE, stage=0, stream=stream, group=1, bucket=0, size_bytes=256)
    plan = insert(plan, 0, second, after=SCATTER, waits=(SCATTER,))
    after = find(plan, 0, "0ALL_REDUCE@dense0")
    return change(plan, 0, "NORM", edit=lambda t: replace(t, waits=(after,)))


def test_shards_and_then_their_copies_hold_every_replica_once():
    assert check_plan(hybrid(((0, 2), (1, 3)))) == []


def test_copies_that_share_replicas_are_summed_twice():
    assert "more than once" in found(hybrid(((0, 1), (2, 3))))["reduced-twice"].message


def test_shards_without_their_copies_lack_replicas():
    lost = found(drop(hybrid(((0, 2), (1, 3))), 0, "0ALL_REDUCE@dense0"))
    assert "sums the gradients of 2 of 4 replicas" in lost["never-reduced"].message


def test_a_bucket_must_be_reduced_over_its_own_group():
    plan = change(hybrid(((0, 2), (1, 3))), 0, SCATTER, edit=lambda t: replace(t, group=2))
    assert "is not reduced over its group shard0" in found(plan)["never-reduced"].message


def two_copies() -> Plan:
    """Stage 0 on two pipeline ranks, each with half of the microbatches, and its gradients tied."""
    plan = pipeline_plan(1, 4, tied=False, clip=False)
    device = plan.device_plans[0]
    names = tuple(device.buckets[0].parameters)
    tied = replace(
        device.buckets[0], name="tied0", kind="tied", group=1, zero=0, shard_count=1, parameters=names
    )
    groups = (
        Group(name="dp0", axis="dp", pipeline_ranks=(0,), members=((0, 1),)),
        Group(name="tied0", axis="pp", pipeline_ranks=(0, 1), members=((0, 2), (1, 3))),
        Group(name="dp1", axis="dp", pipeline_ranks=(1,), members=((2, 3),)),
    )
    stream = device.streams.index("dp")
    devices = []
    for rank in (0, 1):
        buckets = (replace(device.buckets[0], group=2 * rank), tied)
        devices.append(replace(device, pipeline_rank=rank, buckets=buckets))
    plan = replace(
        plan, groups=groups, device_plans=tuple(devices), mesh=Mesh(axes=(("dp", 2), ("pp", 2))),
        training=replace(plan.training),
    )  # fmt: skip
    for rank in (0, 1):
        for microbatch in (0, 1) if rank else (2, 3):
            plan = drop(drop(plan, rank, f"0B{microbatch}"), rank, f"0F{microbatch}")
        last = f"0B{3 if rank else 1}"
        tie = Task(kind=TaskKind.ALL_REDUCE, stage=0, stream=stream, group=1, bucket=1, size_bytes=320)
        plan = insert(plan, rank, tie, after=last, waits=(last,))
        tasks = tasks_of(plan, rank)
        place = find(plan, rank, SCATTER)
        tasks[place] = replace(tasks[place], group=2 * rank, waits=(find(plan, rank, "0ALL_REDUCE@tied0"),))
        first = next(i for i, task in enumerate(tasks) if task.kind is TaskKind.F)
        gather = find(plan, rank, "0ALL_GATHER@dense0")
        tasks[gather] = replace(tasks[gather], group=2 * rank)
        tasks[first] = replace(tasks[first], previous_step_waits=(gather,))
        plan = with_tasks(plan, rank, tasks)
    return plan


def test_two_copies_of_a_stage_share_its_microbatches():
    assert check_plan(two_copies()) == []


def test_two_copies_whose_gradients_nobody_adds_are_named():
    plan = two_copies()
    devices = tuple(replace(device, buckets=device.buckets[:1]) for device in plan.device_plans)
    for rank in (0, 1):
        tasks = drop(replace(plan, device_plans=plan.device_plans), rank, "0ALL_REDUCE@tied0")
        devices = (
            *devices[:rank],
            replace(devices[rank], tasks=tasks.device_plans[rank].tasks),
            *devices[rank + 1 :],
        )
    lost = found(replace(plan, device_plans=devices))
    assert "is shared with other pipeline ranks" in lost["never-reduced"].message


def test_a_microbatch_that_runs_backward_on_the_other_copy_is_named():
    plan = two_copies()
    backward = replace(tasks_of(plan, 0)[find(plan, 0, "0B1")], waits=(), allocates=(), reads=(), frees=())
    moved = change(plan, 0, "0B1", edit=lambda t: replace(t, microbatch=0))
    plan = insert(moved, 1, replace(backward, microbatch=1), after="0F2")
    assert "runs backward on rank 1, but its forward on rank 0" in found(plan)["wrong-copy"].message

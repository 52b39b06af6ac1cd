"""A legal plan passes; each way to break it is found, by its rule, with the tasks named."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.errors import IllegalPlanError
from simulator.plan import RECV_KINDS, IndexLists, Plan, Task, TaskKind
from simulator.plan.check import Violation, check_plan, require_legal
from tests.simulator.plan.pipelines import (
    change,
    drop,
    find,
    move,
    pipeline_plan,
    repeat,
    tasks_of,
    with_tasks,
)


def rules(plan: Plan) -> set[str]:
    return {violation.rule for violation in check_plan(plan)}


def only(plan: Plan, rule: str) -> Violation:
    found = [violation for violation in check_plan(plan) if violation.rule == rule]
    assert len(found) == 1, [str(violation) for violation in check_plan(plan)]
    return found[0]


def without_wait(plan: Plan, rank: int, code: str, *, on: str) -> Plan:
    gone = find(plan, rank, on)

    def edit(task: Task) -> Task:
        assert gone in task.waits
        return replace(task, waits=tuple(wait for wait in task.waits if wait != gone))

    return change(plan, rank, code, edit=edit)


@given(ranks=st.integers(1, 5), microbatches=st.integers(1, 7), clip=st.booleans(), tied=st.booleans())
@settings(max_examples=40)
def test_legal_plans_of_every_size_have_no_violation(*, ranks, microbatches, clip, tied):
    plan = pipeline_plan(ranks, microbatches, clip=clip, tied=tied)
    assert check_plan(plan) == []
    require_legal(plan)


@given(data=st.data())
def test_dropping_any_wait_that_orders_anything_is_found(data):
    """Receives are gated to save memory only, and a stream orders its own tasks: the rest is needed."""
    plan = pipeline_plan(3, 3)
    waiting = [
        (rank, code, plan.device_plans[rank].codes()[wait])
        for rank in range(3)
        for code, task in zip(plan.device_plans[rank].codes(), tasks_of(plan, rank), strict=True)
        for wait in task.waits
        if task.kind not in RECV_KINDS and tasks_of(plan, rank)[wait].stream != task.stream
    ]
    rank, code, on = data.draw(st.sampled_from(waiting))
    found = check_plan(without_wait(plan, rank, code, on=on))
    assert any(f"rank {rank}: {code}" in violation.tasks for violation in found)


def test_a_forward_that_does_not_wait_for_its_receive_is_named_twice_over():
    plan = without_wait(pipeline_plan(), 1, "1F2", on="1RECV_F2")
    missing = only(plan, "missing-order")
    assert missing.message == "rank 1: 1F2 needs the result of rank 1: 1RECV_F2, but does not wait for it"
    unready = [violation for violation in check_plan(plan) if violation.rule == "missing-wait"]
    assert "RECV_F of microbatch 2" in unready[0].message
    assert unready[0].tasks == ("rank 1: 1F2", "rank 1: 1RECV_F2")


def test_tasks_that_wait_for_each_other_are_a_cycle_named_by_codes():
    base = pipeline_plan()
    late = find(base, 1, "1B1")
    plan = change(base, 1, "1F0", edit=lambda task: replace(task, waits=(*task.waits, late)))
    cycle = only(plan, "cycle")
    assert "rank 1: 1F0 -> 1B1 -> " in cycle.message
    assert cycle.message.endswith("-> 1F0 (each waits for the next)")
    assert {"rank 1: 1F0", "rank 1: 1B1"} <= set(cycle.tasks)


def test_a_wait_on_a_task_that_is_dispatched_later_is_legal_when_it_can_be_met():
    base = pipeline_plan()
    update = find(base, 0, "0UPDATE@dense0")
    extra = Task(kind=TaskKind.NORM, stream=base.device_plans[0].streams.index("recv<1"), waits=(update,))
    tasks = tasks_of(base, 0)
    position = find(base, 0, "0B3")
    tail = [replace(task, waits=tuple(w + (w >= position) for w in task.waits)) for task in tasks[position:]]
    plan = with_tasks(base, 0, [*tasks[:position], replace(extra, waits=(update + 1,)), *tail])
    assert "cycle" not in rules(plan)


def test_swapped_sends_are_a_different_order_and_a_circular_wait():
    plan = move(pipeline_plan(), 0, "0SEND_F0", before="0SEND_F2")
    order = only(plan, "transfer-order")
    assert order.tasks == ("rank 0: 0SEND_F1", "rank 1: 1RECV_F0")
    assert "rank 0 to rank 1" in order.message
    wait = only(plan, "circular-wait")
    assert "rank 0: 0SEND_F0" in wait.tasks
    assert "rank 1: 1RECV_F0" in wait.tasks
    assert "tasks never start" in wait.message


def test_sends_on_the_compute_stream_that_face_each_other_are_a_circular_wait():
    """Both ranks send before they receive: fine when sends are handed over, a hang when they wait."""
    plan = pipeline_plan(2, 4)
    for rank in (0, 1):
        tasks = [replace(task, stream=0) for task in tasks_of(plan, rank)]
        plan = with_tasks(plan, rank, tasks)
    wait = only(plan, "circular-wait")
    assert wait.tasks[0].startswith("rank ")
    assert any("SEND" in task for task in wait.tasks)


def test_a_send_without_receive_is_unmatched_and_the_value_is_not_lost_silently():
    plan = pipeline_plan()
    lonely = only(drop(plan, 1, "1RECV_F3"), "transfer-unmatched")
    assert lonely.message == "rank 0: 0SEND_F3 has no matching receive on rank 1"
    both = drop(drop(plan, 1, "1RECV_F3"), 0, "0SEND_F3")
    assert "activations of microbatch 3" in only(both, "transfer-missing").message


def test_a_repeated_send_and_unequal_sizes_are_named():
    plan = pipeline_plan()
    assert only(repeat(plan, 0, "0SEND_F1"), "transfer-repeated").tasks == ("rank 0: 0SEND_F1",)
    shrunk = change(plan, 1, "1RECV_F1", edit=lambda task: replace(task, size_bytes=12))
    assert "sends 256 bytes" in only(shrunk, "transfer-size").message
    assert "receives 12 bytes" in only(shrunk, "transfer-size").message


def test_a_transfer_to_a_rank_that_lacks_the_stage_is_misplaced():
    plan = pipeline_plan(3, 2)
    plan = change(plan, 0, "0SEND_F1", edit=lambda task: replace(task, peer=2))
    plan = change(plan, 1, "1RECV_F1", edit=lambda task: replace(task, peer=2))
    assert {"transfer-unmatched", "transfer-misplaced"} <= rules(plan)


def test_collectives_swapped_on_one_rank_are_named_with_both_orders():
    plan = pipeline_plan(2, 2)
    world = plan.groups.index(next(group for group in plan.groups if group.name == "world"))
    for rank in (0, 1):
        code = f"{rank}ALL_REDUCE@tied0"
        plan = change(plan, rank, code, edit=lambda task: replace(task, group=world))
    assert check_plan(plan) == []
    last = find(plan, 1, "1B1")
    loose = change(plan, 1, "1REDUCE_SCATTER@dense0", edit=lambda task: replace(task, waits=(last,)))
    swapped = move(loose, 1, "1ALL_REDUCE@tied0", before="1UPDATE@dense0")
    order = only(swapped, "collective-order")
    assert order.tasks == ("rank 0: 0ALL_REDUCE@tied0", "rank 1: ALL_REDUCE@norm")
    assert "world" in order.message


def test_a_collective_that_one_member_forgets_is_counted():
    plan = drop(pipeline_plan(), 1, "ALL_REDUCE@norm")
    count = only(plan, "collective-count")
    assert "(1 and 0)" in count.message
    assert only(plan, "never-normed").message.startswith("rank 1 clips gradients")


def test_collectives_of_one_group_on_two_streams_need_an_order():
    base = pipeline_plan(2, 2)
    scatter = find(base, 0, "0REDUCE_SCATTER@dense0")
    sends = base.device_plans[0].streams.index("send>1")
    plan = change(base, 0, "0ALL_GATHER@dense0", edit=lambda task: replace(task, stream=sends, waits=()))
    assert "collective-unordered" in rules(plan)
    ordered = change(plan, 0, "0ALL_GATHER@dense0", edit=lambda task: replace(task, waits=(scatter,)))
    assert "collective-unordered" not in rules(ordered)


def test_a_collective_of_a_foreign_group_is_a_stranger():
    plan = change(pipeline_plan(), 0, "0REDUCE_SCATTER@dense0", edit=lambda task: replace(task, group=1))
    assert only(plan, "collective-stranger").tasks == ("rank 0: 0REDUCE_SCATTER@dense0",)


def test_two_ranks_launch_the_collectives_of_two_groups_in_one_order():
    """Rank 0 sums tied gradients, then the norm; rank 1 launches the norm first, on a stream of its own."""
    plan = pipeline_plan(2, 2)
    last = find(plan, 1, "1B1")
    for code in ("NORM", "1REDUCE_SCATTER@dense0"):
        plan = change(plan, 1, code, edit=lambda task: replace(task, waits=(last,)))
    sends = plan.device_plans[1].streams.index("send>0")
    norm = find(plan, 1, "NORM")
    plan = change(plan, 1, "ALL_REDUCE@norm", edit=lambda task: replace(task, stream=sends, waits=(norm,)))
    for code in ("NORM", "ALL_REDUCE@norm"):
        plan = move(plan, 1, code, before="1ALL_REDUCE@tied0")
    launch = only(plan, "launch-order")
    assert launch.message == (
        "ranks launch collectives of several groups in contradicting orders: "
        "rank 0: 0ALL_REDUCE@tied0 before ALL_REDUCE@norm, but "
        "rank 1: ALL_REDUCE@norm before 1ALL_REDUCE@tied0"
    )


def test_a_buffer_freed_before_its_last_reader_is_named():
    base = pipeline_plan()
    backward = tasks_of(base, 1)[find(base, 1, "1B0")]
    early = change(base, 1, "1B0", edit=lambda task: replace(task, frees=task.frees[1:]))
    plan = change(early, 1, "1F0", edit=lambda task: replace(task, frees=backward.frees[:1]))
    late = only(plan, "read-after-free")
    assert late.tasks == ("rank 1: 1B0", "rank 1: 1F0")


def test_a_buffer_freed_on_another_stream_while_it_is_read_is_named():
    base = pipeline_plan()
    sent = tasks_of(base, 0)[find(base, 0, "0SEND_F0")].frees
    plan = change(base, 0, "0SEND_F0", edit=lambda task: replace(task, frees=()))
    plan = change(plan, 0, "0B0", edit=lambda task: replace(task, frees=(*task.frees, *sent)))
    race = only(plan, "freed-while-read")
    assert race.tasks == ("rank 0: 0SEND_F0", "rank 0: 0B0")
    waits = find(plan, 0, "0SEND_F0")
    safe = change(plan, 0, "0B0", edit=lambda task: replace(task, waits=(*task.waits, waits)))
    assert check_plan(safe) == []


def test_buffers_are_born_once_die_once_and_never_leak():
    base = pipeline_plan()
    born = tasks_of(base, 0)[find(base, 0, "0F0")].allocates
    again = change(base, 0, "0F1", edit=lambda task: replace(task, allocates=(*task.allocates, *born[-1:])))
    assert only(again, "allocated-twice").tasks == ("rank 0: 0F0", "rank 0: 0F1")
    dead = tasks_of(base, 0)[find(base, 0, "0B0")].frees
    twice = change(base, 0, "0B1", edit=lambda task: replace(task, frees=(*task.frees, *dead[-1:])))
    assert only(twice, "freed-twice").tasks == ("rank 0: 0B0", "rank 0: 0B1")
    leaked = change(base, 0, "0B0", edit=lambda task: replace(task, frees=task.frees[:-1]))
    assert "activations of microbatch 0" in only(leaked, "never-freed").message
    unborn = change(base, 0, "0F0", edit=lambda task: replace(task, allocates=task.allocates[:-1]))
    assert "never-allocated" in rules(unborn)


def test_a_buffer_read_before_it_is_allocated_and_a_persistent_one_freed_are_named():
    base = pipeline_plan()
    later = tasks_of(base, 0)[find(base, 0, "0F1")].allocates[-1:]
    early = change(base, 0, "0F0", edit=lambda task: replace(task, reads=(*task.reads, *later)))
    assert only(early, "before-allocate").tasks == ("rank 0: 0F0", "rank 0: 0F1")
    static = change(base, 0, "0B0", edit=lambda task: replace(task, frees=(*task.frees, 0)))
    assert "parameters" in only(static, "persistent-freed").message
    born = change(base, 0, "0F0", edit=lambda task: replace(task, allocates=(*task.allocates, 0)))
    assert only(born, "persistent-allocated").tasks == ("rank 0: 0F0",)


def test_a_forgotten_or_repeated_microbatch_is_named_with_its_stage():
    forgotten = drop(pipeline_plan(), 1, "1B2")
    assert only(forgotten, "backward-count").message == (
        "stage 1 microbatch 2 (segments 2..3) has 0 B + 0 BI + 0 BW on rank 1, must be 1 B, or 1 BI and 1 BW"
    )
    repeated = only(repeat(pipeline_plan(), 0, "0F3"), "forward-count")
    assert repeated.tasks == ("rank 0: 0F3", "rank 0: 0F3")
    part = change(pipeline_plan(), 0, "0F3", edit=lambda task: replace(task, first_segment=1))
    assert "(segments 0..0)" in only(part, "forward-count").message


def test_split_backwards_are_legal_only_as_a_pair_in_order():
    base = pipeline_plan()
    index = find(base, 1, "1B3")
    tasks = tasks_of(base, 1)
    inputs = replace(tasks[index], kind=TaskKind.BI, frees=())
    tasks[index] = inputs
    alone = with_tasks(base, 1, tasks)
    assert "1 BI + 0 BW" in only(alone, "backward-count").message
    weights = replace(inputs, kind=TaskKind.BW, allocates=(), waits=(), frees=tasks_of(base, 1)[index].frees)
    tail = [replace(task, waits=tuple(w + (w > index) for w in task.waits)) for task in tasks[index + 1 :]]
    update = next(i for i, task in enumerate(tail) if task.kind is TaskKind.ALL_REDUCE)
    tail[update] = replace(tail[update], waits=(index + 1,))
    first = find(base, 1, "1F0")
    tasks[first] = replace(tasks[first], previous_step_waits=(len(tasks),))
    assert check_plan(with_tasks(base, 1, [*tasks[: index + 1], weights, *tail])) == []
    swapped = [*tasks[:index], replace(weights, frees=()), replace(inputs, frees=weights.frees), *tail]
    plan = with_tasks(base, 1, swapped)
    assert ("rank 1: 1BI3", "rank 1: 1BW3") in {violation.tasks for violation in check_plan(plan)}


def test_a_backward_before_its_forward_and_a_foreign_stage_are_named():
    early = move(pipeline_plan(), 1, "1B1", before="1F1")
    assert any(
        violation.rule == "cycle" and violation.tasks == ("rank 1: 1F1", "rank 1: 1B1")
        for violation in check_plan(early)
    )
    foreign = change(pipeline_plan(), 1, "1F1", edit=lambda task: replace(task, first_segment=0))
    assert only(foreign, "wrong-stage").tasks == ("rank 1: 1F1",)


@pytest.mark.parametrize(
    ("code", "never", "twice"),
    [
        ("0UPDATE@dense0", "never-updated", "updated-twice"),
        ("0REDUCE_SCATTER@dense0", "never-reduced", "reduced-twice"),
        ("0ALL_REDUCE@tied0", "never-reduced", "reduced-twice"),
        ("0ALL_GATHER@dense0", "never-gathered", "gathered-twice"),
    ],
)
def test_the_end_of_the_step_happens_once_for_each_bucket(code, never, twice):
    bucket = code.split("@")[1]
    assert f"bucket {bucket} of rank 0" in only(drop(pipeline_plan(), 0, code), never).message
    assert only(repeat(pipeline_plan(), 0, code), twice).tasks == (f"rank 0: {code}",) * 2


def test_a_parameter_in_no_bucket_is_never_updated():
    plan = pipeline_plan()
    device = plan.device_plans[0]
    bucket = replace(device.buckets[0], parameters=("embedding.w",))
    devices = (replace(device, buckets=(bucket, *device.buckets[1:])), *plan.device_plans[1:])
    lost = only(replace(plan, device_plans=devices), "never-updated")
    assert lost.message == "parameter layers.0.w of rank 0 is in no bucket: it is never updated"


def test_a_shared_parameter_that_is_not_summed_and_replicas_without_group_are_named():
    plan = pipeline_plan(tied=True)
    device = plan.device_plans[0]
    apart = drop(plan, 0, "0ALL_REDUCE@tied0").device_plans[0]
    alone = replace(apart, buckets=device.buckets[:1])
    assert (
        "embedding.w"
        in only(replace(plan, device_plans=(alone, plan.device_plans[1])), "never-reduced").message
    )
    groupless = replace(device, buckets=(replace(device.buckets[0], group=-1), device.buckets[1]))
    found = only(replace(plan, device_plans=(groupless, plan.device_plans[1])), "never-reduced")
    assert "has replicas but no group" in found.message


@pytest.mark.parametrize(
    ("code", "on", "tasks"),
    [
        ("0ALL_REDUCE@tied0", "0B3", ("rank 0: 0B3", "rank 0: 0ALL_REDUCE@tied0")),
        ("NORM", "0REDUCE_SCATTER@dense0", ("rank 0: 0REDUCE_SCATTER@dense0", "rank 0: NORM")),
        ("0UPDATE@dense0", "ALL_REDUCE@norm", ("rank 0: ALL_REDUCE@norm", "rank 0: 0UPDATE@dense0")),
        ("0ALL_GATHER@dense0", "0UPDATE@dense0", ("rank 0: 0UPDATE@dense0", "rank 0: 0ALL_GATHER@dense0")),
    ],
)
def test_the_end_of_the_step_keeps_its_order(code, on, tasks):
    found = check_plan(without_wait(pipeline_plan(), 0, code, on=on))
    assert ("missing-order", tasks) in {(violation.rule, violation.tasks) for violation in found}


def test_a_next_step_that_does_not_wait_for_gathered_parameters_is_stale():
    plan = change(pipeline_plan(), 1, "1F0", edit=lambda task: replace(task, previous_step_waits=()))
    stale = only(plan, "stale-parameters")
    assert stale.tasks == ("rank 1: 1F0", "rank 1: 1ALL_GATHER@dense0")


def test_an_input_that_no_edge_carries_and_a_stage_without_segments_are_named():
    plan = pipeline_plan()
    cut = replace(plan, edges=(replace(plan.edges[0], values=(), grad_values=()),))
    assert only(cut, "edge-missing").message == (
        "segment 2 (part2) needs output 0 of segment 1 (part1) on another rank, but no edge carries it"
    )
    segments = tuple(replace(segment, stage=0) for segment in plan.segments)
    assert only(replace(plan, segments=segments), "stage-lost").message.startswith("stage 1 has no segments")


def test_an_index_out_of_range_is_reported_alone():
    plan = change(pipeline_plan(), 1, "1F0", edit=lambda task: replace(task, stream=9))
    assert [violation.rule for violation in check_plan(plan)] == ["index"]
    assert "device_plans[1].tasks.stream" in check_plan(plan)[0].message


def test_ragged_columns_are_reported_alone():
    plan = pipeline_plan()
    device = plan.device_plans[0]
    short = replace(device.tasks, reads=IndexLists.from_rows([()]))
    broken = replace(plan, device_plans=(replace(device, tasks=short), *plan.device_plans[1:]))
    assert "device_plans[0].tasks.reads = 1 must have one entry per task" in check_plan(broken)[0].message


def test_require_legal_lists_every_violation_and_exits_with_4():
    plan = drop(drop(pipeline_plan(), 1, "1RECV_F3"), 0, "0UPDATE@dense0")
    with pytest.raises(IllegalPlanError) as caught:
        require_legal(plan, where="plan.json")
    error = caught.value
    assert error.exit_code == 4
    assert error.where == "plan.json"
    assert error.field == "violations"
    assert error.value == len(check_plan(plan)) == len(error.violations)
    assert any(text.startswith("never-updated: bucket dense0") for text in error.violations)
    assert "piper check" in error.fix

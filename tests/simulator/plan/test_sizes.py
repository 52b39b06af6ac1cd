"""What a task puts into its buffers must fit, and equal tasks of equal microbatches allocate the same."""

from dataclasses import replace

import numpy as np

from simulator.plan import MemoryClass, Plan, TensorSpec
from simulator.plan.check import Violation, check_plan
from tests.jobs import compiled
from tests.simulator.plan.pipelines import change, find, pipeline_plan, tasks_of


def only(plan: Plan) -> Violation:
    found = check_plan(plan)
    assert len(found) == 1, [str(violation) for violation in found]
    return found[0]


def shrunk(plan: Plan, rank: int, buffer: int, *, by: int = 1) -> Plan:
    device = plan.device_plans[rank]
    sizes = device.buffers.size_bytes.copy()
    sizes[buffer] -= by
    devices = list(plan.device_plans)
    devices[rank] = replace(device, buffers=replace(device.buffers, size_bytes=sizes))
    return replace(plan, device_plans=tuple(devices))


def test_a_message_that_does_not_fit_what_its_receive_allocates_is_named():
    plan = pipeline_plan()
    (buffer,) = tasks_of(plan, 1)[find(plan, 1, "1RECV_F2")].allocates
    small = [v for v in check_plan(shrunk(plan, 1, buffer)) if v.rule == "buffer-too-small"]
    assert [v.message for v in small] == [
        "rank 1: 1RECV_F2 moves 256 bytes, but its buffers have 255 (RECV_F of microbatch 2)"
    ]


def test_a_send_from_too_small_a_buffer_is_named():
    plan = pipeline_plan()
    (buffer,) = tasks_of(plan, 0)[find(plan, 0, "0SEND_F1")].reads
    small = {v.tasks for v in check_plan(shrunk(plan, 0, buffer)) if v.rule == "buffer-too-small"}
    assert small == {("rank 0: 0SEND_F1",)}


def test_parameters_and_gradients_must_fit_their_buffers():
    plan = pipeline_plan(1, 2, tied=False)
    static = np.flatnonzero(plan.device_plans[0].buffers.persistent).tolist()
    parameters = only(shrunk(plan, 0, static[0], by=500))
    assert parameters.message == ("rank 0 has 592 bytes of parameters, but its parameter buffers have 524")
    gradients = only(shrunk(plan, 0, static[1], by=600))
    assert "reduces 512 bytes of gradients (rank 0: 0REDUCE_SCATTER@dense0)" in gradients.message


def test_activations_that_are_smaller_for_one_of_equal_microbatches_are_odd():
    plan = pipeline_plan(1, 4)
    buffer = tasks_of(plan, 0)[find(plan, 0, "0F2")].allocates[-1]
    odd = only(shrunk(plan, 0, buffer))
    assert odd.rule == "buffer-size"
    assert odd.tasks == ("rank 0: 0F2", "rank 0: 0F0")


def test_microbatches_of_another_size_may_allocate_other_sizes():
    assert check_plan(compiled("pp=2", global_batch=7, micro_batch=2)) == []


def test_a_message_has_the_bytes_of_its_tensors_for_its_own_microbatch():
    plan = compiled("pp=2", global_batch=7, micro_batch=2)
    sizes = {
        code: int(plan.device_plans[0].tasks.size_bytes[find(plan, 0, code)])
        for code in ("0SEND_F0", "0SEND_F3")
    }
    assert sizes["0SEND_F0"] == 2 * sizes["0SEND_F3"]
    same = replace(plan, training=replace(plan.training, micro_batch_sizes=(1, 2, 2, 2)))
    wrong = {v.tasks for v in check_plan(same) if v.rule == "transfer-bytes"}
    assert ("rank 0: 0SEND_F3",) in wrong


def test_tensors_of_another_dtype_are_other_bytes():
    plan = pipeline_plan()
    narrow = tuple(
        replace(segment, outputs=(TensorSpec(shape=(2, 8, 4), dtype="bf16"),)) for segment in plan.segments
    )
    wrong = [v for v in check_plan(replace(plan, segments=narrow)) if v.rule == "transfer-bytes"]
    assert wrong[0].message == (
        "rank 0: 0SEND_F0 moves 256 bytes, but the tensors from stage 0 to stage 1 have 128"
    )


def test_shares_of_a_tensor_are_legal_where_ranks_cut_it():
    plan = pipeline_plan()
    mesh = replace(plan.mesh, axes=(("tp", 2), ("dp", 1), ("pp", 2)))
    for rank, code in ((0, "0SEND_F"), (1, "1RECV_F"), (1, "1SEND_B"), (0, "0RECV_B")):
        for microbatch in range(4):
            plan = change(plan, rank, f"{code}{microbatch}", edit=lambda task: replace(task, size_bytes=128))
    assert {v.rule for v in check_plan(plan)} == {"transfer-bytes"}
    assert "transfer-bytes" not in {v.rule for v in check_plan(replace(plan, mesh=mesh))}


def test_optimizer_state_must_fit_its_buffers() -> None:
    plan = compiled("dp=2,zero=1", dtype="bf16", optimizer="adamw")
    classes = plan.device_plans[0].buffers.memory_class
    buffer = int((classes == MemoryClass.OPTIMIZER).argmax())
    found = only(shrunk(plan, 0, buffer))
    needed = plan.device_plans[0].buckets[0].padded_numel // 2 * 12
    assert found.message == (
        f"rank 0 has {needed} bytes of optimizer state, but its optimizer buffers have {needed - 1}"
    )


def test_a_microbatch_uses_only_its_own_buffers() -> None:
    plan = compiled("dp=1,schedule=gpipe", global_batch=2)
    device = plan.device_plans[0]
    swapped = device.buffers.microbatch.copy()
    mine = swapped >= 0
    swapped[mine] = 1 - swapped[mine]
    broken = replace(device, buffers=replace(device.buffers, microbatch=swapped))
    found = check_plan(replace(plan, device_plans=(broken,)))
    assert {violation.rule for violation in found} == {"wrong-microbatch"}
    assert "which is of another microbatch" in found[0].message

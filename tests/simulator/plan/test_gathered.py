"""Parameters and gradients that are cut over ranks (ZeRO-2, 3): gathered for each use, added up in full."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.plan import MemoryClass, Plan, TaskKind
from simulator.plan.check import check_plan
from tests.jobs import compiled
from tests.plan_edits import edited, tasks_of


def gather_before_backward(plan: Plan) -> int:
    return next(
        number
        for number, task in enumerate(tasks_of(plan.device_plans[0]))
        if task.kind is TaskKind.ALL_GATHER and task.phase == TaskKind.B
    )


def test_a_backward_that_reads_no_gather_of_its_bucket_is_named() -> None:
    """The gather of another bucket comes in its place: what the forward gathered is gone by then."""
    plan = compiled("dp=2,zero=3,schedule=gpipe", layers=3, global_batch=4)
    number = gather_before_backward(plan)
    device = plan.device_plans[0]
    bucket = int(device.tasks.bucket[number])
    other = (bucket + 1) % len(device.buckets)
    found = [v for v in check_plan(edited(plan, 0, number, bucket=other)) if v.rule == "never-gathered"]
    assert found
    assert found[0].message.endswith(
        f"uses bucket {device.buckets[bucket].name} of rank 0, but reads no gather of it"
    )


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gradient_buffers_hold_what_is_left_of_every_reduction(zero: int) -> None:
    plan = compiled(f"dp=2,zero={zero}", global_batch=4)
    device = plan.device_plans[0]
    sizes = device.buffers.size_bytes.copy()
    sizes[int((device.buffers.memory_class == MemoryClass.GRADIENTS).argmax())] -= 1
    smaller = replace(device, buffers=replace(device.buffers, size_bytes=sizes))
    found = [v for v in check_plan(replace(plan, device_plans=(smaller,))) if v.rule == "buffer-too-small"]
    assert len(found) == 1
    assert "bytes of gradients" in found[0].message


def test_a_backward_right_behind_its_forward_shares_its_gather() -> None:
    """1F1B on one rank: B0 of the last unit follows F0 at once; in GPipe another microbatch comes first."""
    near, far = (
        compiled(f"dp=2,zero=3,schedule={name}", layers=3, global_batch=4) for name in ("1f1b", "gpipe")
    )
    last = f"@{near.device_plans[0].buckets[-1].name}"
    counts = [
        sum("ALL_GATHER:B" in code and code.endswith(last) for code in plan.device_plans[0].codes())
        for plan in (near, far)
    ]
    assert counts[0] < counts[1]
    assert check_plan(near) == []

"""What is recomputed for one microbatch is recomputed for all that keep as little, and once."""

from dataclasses import replace

from simulator.plan import Plan, TaskKind
from simulator.plan.check import Violation, check_plan
from tests.jobs import compiled
from tests.plan_edits import tasks_of, twice, with_tasks, without


def plan_with(recompute: str = "full") -> Plan:
    return compiled(f"pp=2,schedule=1f1b,recompute={recompute}", global_batch=4)


def only(plan: Plan) -> Violation:
    found = check_plan(plan)
    assert len(found) == 1, [str(violation) for violation in found]
    return found[0]


def recompute_of(plan: Plan, microbatch: int) -> int:
    table = plan.device_plans[0].tasks
    return int(((table.kind == TaskKind.R) & (table.microbatch == microbatch)).argmax())


def test_a_segment_that_is_not_recomputed_for_one_microbatch_lacks_activations() -> None:
    plan = plan_with()
    left = without(tasks_of(plan.device_plans[0]), {recompute_of(plan, 2)})
    found = only(with_tasks(plan, 0, left))
    assert found.rule == "never-recomputed"
    assert found.message.startswith("microbatch 2 of stage 0 (segments ")
    assert found.message.endswith("keeps no more than that of microbatch 3, which is")
    assert found.tasks[0].startswith("rank 0: 0B2")
    assert found.directives[0].startswith("recompute")


def test_a_segment_that_is_recomputed_twice_is_named() -> None:
    plan = plan_with()
    again = twice(tasks_of(plan.device_plans[0]), recompute_of(plan, 1))
    found = only(with_tasks(plan, 0, again))
    assert found.rule == "recomputed-twice"
    assert "microbatch 1 of stage 0" in found.message


def test_a_microbatch_whose_forward_keeps_more_may_do_without() -> None:
    plan = plan_with()
    device = plan.device_plans[0]
    left = without(tasks_of(device), {recompute_of(plan, 2)})
    forward = next(task for task in left if task.kind is TaskKind.F and task.microbatch == 2)
    sizes = device.buffers.size_bytes.copy()
    sizes[list(forward.allocates)] += 1000
    changed = replace(plan, device_plans=(
        replace(device, buffers=replace(device.buffers, size_bytes=sizes)), *plan.device_plans[1:]
    ))  # fmt: skip
    assert "never-recomputed" not in {v.rule for v in check_plan(with_tasks(changed, 0, left))}


def test_plans_with_and_without_recompute_are_legal() -> None:
    assert check_plan(plan_with()) == []
    assert check_plan(plan_with("none")) == []

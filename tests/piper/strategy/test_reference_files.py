"""Three strategy files as the published system writes them load unchanged and get our meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from piper.graph import CapturedModel
from piper.schedules import schedule_rows
from simulator.plan import DevicePlan, Plan, TaskKind
from simulator.plan.check import check_plan
from tests.graphs import transformer
from tests.jobs import compiled

FOLDER = Path(__file__).parent / "reference_files"
PASSES = (TaskKind.F, TaskKind.B, TaskKind.BI, TaskKind.BW)


def dense(micro_batch: int) -> CapturedModel:
    return transformer(layers=6, micro_batch=micro_batch)


def sparse(micro_batch: int) -> CapturedModel:
    return transformer(layers=6, micro_batch=micro_batch, experts=True)


@pytest.fixture(scope="module")
def pipeline() -> Plan:
    return compiled(str(FOLDER / "pp2_dp2_1f1b.json"), model=dense)


@pytest.fixture(scope="module")
def zero3() -> Plan:
    return compiled(str(FOLDER / "zero3_buckets_streams.json"), model=dense)


@pytest.fixture(scope="module")
def experts() -> Plan:
    return compiled(str(FOLDER / "moe_dualpipe_v_ep2.json"), model=sparse)


def members(plan: Plan, axis: str) -> set[tuple[int, ...]]:
    return {ranks for group in plan.groups if group.axis == axis for ranks in group.members}


def on(device: DevicePlan, stream: str) -> set[str]:
    number = device.streams.index(stream)
    return {task.kind.name for task in device.tasks if task.stream == number}


def counted(device: DevicePlan, kind: TaskKind) -> int:
    return sum(task.kind is kind for task in device.tasks)


def passes(device: DevicePlan) -> list[str]:
    """Return the codes of the passes in dispatch order, parts of a stage taken together."""
    coded = zip(device.tasks, device.codes(), strict=True)
    return list(dict.fromkeys(code.partition("/")[0] for task, code in coded if task.kind in PASSES))


def entries(plan: Plan, op: str) -> list[dict[str, Any]]:
    return [d for d in plan.directives if d["op"] == op]


@pytest.mark.parametrize("name", ["pipeline", "zero3", "experts"])
def test_the_plan_of_a_reference_file_is_legal(name: str, request: pytest.FixtureRequest) -> None:
    assert [str(violation) for violation in check_plan(request.getfixturevalue(name))] == []


def test_device_numbers_name_groups_that_become_ranks_in_order(pipeline: Plan) -> None:
    assert (pipeline.mesh.size("pp"), pipeline.mesh.size("dp")) == (2, 2)
    assert members(pipeline, "dp") == {(0, 1), (2, 3), (0, 1, 2, 3)}
    assert [device.stages for device in pipeline.device_plans] == [(0,), (1,)]


def test_rows_of_indices_as_text_are_1f1b(pipeline: Plan) -> None:
    named = compiled("pp=2,dp=2,schedule=1f1b", model=dense, global_batch=8)
    for stated, scheduled in zip(pipeline.device_plans, named.device_plans, strict=True):
        assert passes(stated) == passes(scheduled)


def test_gradients_are_reduced_once_per_step_on_the_named_stream(pipeline: Plan) -> None:
    for device in pipeline.device_plans:
        assert on(device, "dp_stream") == {"ALL_REDUCE"}
        number = device.streams.index("dp_stream")
        assert sum(task.stream == number for task in device.tasks) == len(device.buckets) == 1


def test_three_stages_of_one_group_are_one_pipeline_rank(zero3: Plan) -> None:
    assert (zero3.mesh.size("pp"), zero3.mesh.size("dp")) == (1, 2)
    assert zero3.device_plans[0].stages == (0, 1, 2)
    assert [bucket.zero for bucket in zero3.device_plans[0].buckets] == [3, 3, 3]


def test_gathers_and_reductions_run_on_the_streams_that_the_file_names(zero3: Plan) -> None:
    device = zero3.device_plans[0]
    assert on(device, "gather_stream") == {"ALL_GATHER"}
    assert "REDUCE_SCATTER" in on(device, "reduce_stream")


def test_kept_parameters_are_gathered_once_others_before_each_pass_that_does_not_follow_one_of_theirs(
    zero3: Plan,
) -> None:
    device = zero3.device_plans[0]
    gathers = [task.stage for task in device.tasks if task.kind is TaskKind.ALL_GATHER]
    assert {stage: gathers.count(stage) for stage in (0, 1, 2)} == {0: 3, 1: 4, 2: 1}
    assert counted(device, TaskKind.REDUCE_SCATTER) == 3 * 2


def test_aliases_are_read_under_our_names(zero3: Plan) -> None:
    stated = entries(zero3, "replicate")
    assert [d["bucket_mb"] for d in stated] == [1, 1, 1]
    assert [d.get("prefetch") for d in stated] == [2, 2, None]
    assert [d.get("reshard", True) for d in stated] == [True, True, False]


def test_stages_lie_in_a_v_over_two_groups(experts: Plan) -> None:
    assert [device.stages for device in experts.device_plans] == [(0, 3), (1, 2)]


def test_overlap_slots_are_dualpipe_v(experts: Plan) -> None:
    rows = schedule_rows("dualpipe_v", num_pipeline_ranks=2, num_microbatches=4, virtual_stages_per_rank=2)
    for device, row in zip(experts.device_plans, rows, strict=True):
        assert sorted(passes(device)) == sorted(task.code for slot in row for task in slot)
        alone = [slot[0].code for slot in row if len(slot) == 1]
        assert [code for code in passes(device) if code in alone] == alone
        assert {len(slot) for slot in row} == {1, 2}


def test_experts_are_owned_by_the_members_of_the_group(experts: Plan) -> None:
    assert entries(experts, "shard")[0]["degree"] == 2
    assert members(experts, "ep") == {(0, 1), (2, 3)}
    kinds = {(bucket.stage, bucket.kind) for bucket in experts.device_plans[0].buckets}
    assert kinds == {(stage, kind) for stage in (0, 3) for kind in ("dense", "expert")}


def test_tokens_travel_to_the_experts_and_back_in_each_pass(experts: Plan) -> None:
    device = experts.device_plans[0]
    assert on(device, "ep_stream") == {"ALL_TO_ALL"}
    regions = sum("EP" in dict(segment.tags) and segment.stage in {0, 3} for segment in experts.segments)
    assert counted(device, TaskKind.ALL_TO_ALL) == regions * 2 * 2 * 4


def test_gradients_of_experts_that_one_rank_owns_are_not_reduced(experts: Plan) -> None:
    device = experts.device_plans[0]
    reduced = {
        device.buckets[task.bucket].kind for task in device.tasks if task.kind is TaskKind.REDUCE_SCATTER
    }
    assert reduced == {"dense"}

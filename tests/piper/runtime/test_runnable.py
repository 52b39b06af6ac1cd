"""Plans that the runtime cannot run are refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from piper.errors import JobError
from piper.graph import CapturedModel
from piper.runtime.runnable import require_runnable
from simulator.plan import Cuts, Mesh, ParameterCut, Plan, Region, TaskKind, TaskTable
from tests.graphs import transformer
from tests.jobs import compiled


def transformer_of(micro_batch: int) -> CapturedModel:
    return transformer(layers=6, micro_batch=micro_batch)


def plan() -> Plan:
    return compiled("pp=2,dp=2", gpus=4, global_batch=8, micro_batch=1)


def changed(**columns: object) -> Plan:
    found = plan()
    first = found.device_plans[0]
    table = replace(first.tasks, **columns)
    return replace(found, device_plans=(replace(first, tasks=table), *found.device_plans[1:]))


def test_a_pipeline_with_replicas_is_runnable() -> None:
    require_runnable(plan())


def with_regions(*regions: Region) -> Plan:
    return replace(plan(), cuts=Cuts(regions=regions))


def test_sequences_that_do_not_divide_are_refused() -> None:
    cuts = Cuts(regions=(Region(axis="cp", first=1, last=1, degree=3, method="ring"),), balanced=True)
    mesh = Mesh(axes=(("cp", 3), ("dp", 1), ("pp", 2)))
    with pytest.raises(JobError, match=r"(?s)in 6 pieces.*use a multiple of 6 as --seq-len"):
        require_runnable(replace(plan(), cuts=cuts, mesh=mesh))


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"tensor_degree": 2}, "etp=2"),
        ({"capacity": 1.5}, "capacity=1.5"),
        ({}, "without rows sorted by expert"),
    ],
)
def test_experts_that_the_exchange_of_rows_cannot_serve_are_refused(
    options: dict[str, Any], value: str
) -> None:
    with pytest.raises(JobError, match=value):
        require_runnable(with_regions(Region(axis="ep", first=1, last=1, degree=2, **options)))


def test_experts_over_several_degrees_are_refused() -> None:
    regions = [Region(axis="ep", first=i, last=i, degree=i + 1) for i in (1, 3)]
    with pytest.raises(JobError, match="experts over 2 and over 4 ranks"):
        require_runnable(with_regions(*regions))


def test_a_parameter_that_does_not_divide_is_refused() -> None:
    found = replace(plan(), mesh=Mesh(axes=(("tp", 3), ("dp", 1), ("pp", 2))))
    cut = ParameterCut(name=found.parameters[0].name, dims=(("tp", 0),))
    with pytest.raises(JobError, match=r"(?s)rows or columns over tp=3.*use a divisor of"):
        require_runnable(replace(found, cuts=Cuts(parameters=(cut,))))


def test_regions_side_by_side_are_refused() -> None:
    regions = [Region(axis="tp", first=i, last=i, degree=2) for i in (1, 2)]
    with pytest.raises(JobError, match="regions of tp side by side at segment 2"):
        require_runnable(with_regions(*regions))


def test_stages_with_meshes_of_their_own_are_refused() -> None:
    first, *others = plan().device_plans
    mesh = Mesh(axes=(("tp", 1), ("cp", 1), ("dp", 2)))
    with pytest.raises(JobError, match=r"(?s)stages with meshes of their own.*use one mesh for all stages"):
        require_runnable(replace(plan(), device_plans=(replace(first, mesh=mesh), *others)))


@pytest.mark.parametrize("recompute", ["full", "full:1"])
def test_parts_made_again_as_a_whole_are_runnable(recompute: str) -> None:
    require_runnable(compiled(f"pp=2,recompute={recompute}", model=transformer_of, global_batch=4))


def test_buckets_of_another_kind_are_refused() -> None:
    found = plan()
    first = found.device_plans[0]
    bucket = replace(first.buckets[0], kind="other")
    with pytest.raises(JobError, match="other buckets"):
        require_runnable(replace(found, device_plans=(replace(first, buckets=(bucket,)),)))


def test_a_ring_that_attention_waits_for_is_refused() -> None:
    found = compiled("cp=2", model=transformer_of, global_batch=2)
    require_runnable(found)
    (device,) = found.device_plans
    tasks = list(device.tasks)
    ring = next(i for i, task in enumerate(tasks) if task.kind is TaskKind.RING_SHIFT)
    beside = next(
        i for i, task in enumerate(tasks)
        if task.kind is TaskKind.F and task.first_segment <= tasks[ring].part <= task.last_segment
    )  # fmt: skip
    tasks[beside] = replace(tasks[beside], waits=(*tasks[beside].waits, ring))
    waiting = replace(device, tasks=TaskTable.from_tasks(tasks))
    with pytest.raises(JobError, match=r"(?s)a ring whose buffers F of segment.*recompute=full"):
        require_runnable(replace(found, device_plans=(waiting,)))


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_ring_behind_one_whose_attention_runs_later_is_refused(recompute: str) -> None:
    """A ring ends with its attention: one behind it waits, and its own attention for ever."""
    strategy = "pp=2,vp=2,cp=2,schedule={},recompute={}"
    model: dict[str, Any] = {"model": transformer_of, "global_batch": 8}
    require_runnable(compiled(strategy.format("zbv", recompute), **model))
    require_runnable(compiled(strategy.format("dualpipe_v", "none"), **model))
    with pytest.raises(JobError, match=r"(?s)a ring of . of segment .* which runs later.*recompute=none"):
        require_runnable(compiled(strategy.format("dualpipe_v", recompute), **model))

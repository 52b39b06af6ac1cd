"""Whole cost models: the cluster's, unit costs, and the table."""

from dataclasses import replace
from pathlib import Path

import pytest

from cost_models import (
    CLUSTERS,
    COST_MODELS,
    CollectiveKind,
    CostModel,
    Operation,
    OpKind,
    UnitCostModel,
    cluster_cost_model,
    load_cluster,
    load_stack,
    models,
)
from cost_models.errors import CostModelError
from cost_models.models.roofline import Roofline

MATMUL = Operation(
    kind=OpKind.MATMUL,
    name="aten.mm",
    shape=(1, 512, 512, 512),
    dtype="fp32",
    flops=2 * 512**3,
    bytes=3 * 4 * 512**2,
)
FIXED = Operation(kind=OpKind.FIXED, name="F", shape=(), dtype="bf16", flops=0, bytes=0)


def test_the_table_lists_every_file_of_its_folder():
    folder = Path(models.__file__).parent
    assert sorted(COST_MODELS) == sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")


def test_every_class_of_the_table_lives_in_the_file_of_its_name():
    assert {name: cls.__module__ for name, cls in COST_MODELS.items()} == {
        name: f"cost_models.models.{name}" for name in COST_MODELS
    }


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_cluster_answers_every_question_of_a_cost_model(name):
    model: CostModel = cluster_cost_model(name)
    assert model.operation(MATMUL).seconds > 0
    assert model.transfer(size_bytes=4096, source_rank=0, target_rank=1).seconds > 0
    group = model.collective(CollectiveKind.ALL_REDUCE, size_bytes=4096, ranks=range(4))
    assert 0 < group.low_s < group.seconds < group.high_s
    assert 0 <= model.context_bytes < model.device_memory_bytes
    assert model.peak_flops_per_s["fp16"] > 0
    assert model.eager_limit_bytes == 0
    assert name in model.name
    assert "piper" in model.name


def test_a_gpu_is_launched_ahead_and_a_cpu_is_not():
    assert cluster_cost_model("dgx-h100").launch_overhead_s == pytest.approx(10e-6)
    assert cluster_cost_model("local-cpu").launch_overhead_s == 0


def test_the_model_takes_objects_as_well_as_names():
    cluster = load_cluster("dgx-a100")
    stack = replace(load_stack("piper"), launch_overhead_s=1e-6)
    model = cluster_cost_model(cluster, stack=stack)
    assert model.cluster is cluster
    assert model.launch_overhead_s == 1e-6


def test_equal_questions_are_priced_once(monkeypatch):
    asked = []
    price = Roofline.alone
    monkeypatch.setattr(Roofline, "alone", lambda self, op: asked.append(op) or price(self, op))
    model = cluster_cost_model("dgx-h100")
    prices = {model.operation(replace(MATMUL)) for _ in range(1000)}
    assert len(prices) == len(asked) == 1
    model.operation(replace(MATMUL, shape=(1, 512, 512, 513)))
    assert len(asked) == 2


def test_remembered_collectives_and_transfers_keep_their_questions_apart():
    model = cluster_cost_model("dgx-h100")
    kinds = [CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER]
    first = [model.collective(kind, size_bytes=2**20, ranks=range(8)) for kind in kinds]
    assert first[0] != first[1]
    assert [model.collective(kind, size_bytes=2**20, ranks=range(8)) for kind in kinds] == first
    near = model.transfer(size_bytes=2**20, source_rank=0, target_rank=1)
    assert model.transfer(size_bytes=2**20, source_rank=0, target_rank=9) != near
    assert model.transfer(size_bytes=2**20, source_rank=0, target_rank=1) == near


def test_the_peaks_handed_out_cannot_change_the_model():
    model = cluster_cost_model("dgx-h100")
    model.peak_flops_per_s["bf16"] = 1.0
    assert model.peak_flops_per_s["bf16"] == 989.4e12


def test_unit_costs_are_looked_up_by_name_and_communication_is_free():
    model: CostModel = UnitCostModel({"F": 1.0, "B": 2.0})
    assert model.operation(FIXED).seconds == 1.0
    assert model.operation(replace(FIXED, name="B")).seconds == 2.0
    assert model.transfer(size_bytes=2**40, source_rank=0, target_rank=1).seconds == 0
    assert model.collective(CollectiveKind.ALL_REDUCE, size_bytes=1, ranks=(0, 1)).seconds == 0
    assert model.launch_overhead_s == 0
    assert model.eager_limit_bytes > 2**60
    assert model.peak_flops_per_s == {}


def test_unit_communication_costs_what_it_is_told():
    model = UnitCostModel({}, transfer_s=0.5, collective_s=3, eager_limit_bytes=0)
    assert model.transfer(size_bytes=1, source_rank=0, target_rank=1).high_s == 0.5
    assert model.collective(CollectiveKind.ALL_GATHER, size_bytes=1, ranks=(0, 1)).seconds == 3
    assert model.collective(CollectiveKind.ALL_GATHER, size_bytes=1, ranks=(0,)).seconds == 0
    assert model.eager_limit_bytes == 0


@pytest.mark.parametrize("operation", [MATMUL, replace(FIXED, name="FB")])
def test_unit_costs_refuse_what_they_do_not_know(operation):
    with pytest.raises(CostModelError) as caught:
        UnitCostModel({"F": 1.0}).operation(operation)
    assert caught.value.field == "operation"
    assert "durations_s" in caught.value.fix


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), True, "1"])
def test_unit_costs_must_be_times(value):
    with pytest.raises(CostModelError) as caught:
        UnitCostModel({"B": value})
    assert (caught.value.field, caught.value.fix) == ("B", "give a time in seconds")
    with pytest.raises(CostModelError) as caught:
        UnitCostModel({}, transfer_s=value)
    assert caught.value.field == "transfer_s"

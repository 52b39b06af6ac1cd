"""A GPU in training: its measured figures times the factors of its section `training`."""

import pytest

from cost_models import load_cluster, load_gpu
from cost_models.catalogue import cluster_content, figure_of
from cost_models.errors import CostModelError
from cost_models.training import trained


def test_a_cluster_has_its_gpu_as_in_training_and_the_gpu_alone_as_measured() -> None:
    alone, inside = load_gpu("h100-sxm"), load_cluster("dgx-h100").gpu
    factor = figure_of("gpu:h100-sxm:training.matmul.efficiency")
    assert inside.matmul.efficiency == pytest.approx(alone.matmul.efficiency * factor)
    assert inside.matmul.latency_s == alone.matmul.latency_s


def test_a_file_that_holds_its_device_has_the_figures_of_training() -> None:
    gpu = cluster_content("dgx-h100")["gpu"]
    assert "training" not in gpu
    assert gpu["matmul"]["efficiency"] == pytest.approx(load_cluster("dgx-h100").gpu.matmul.efficiency)


def test_factors_scale_numbers_lists_and_quantities() -> None:
    content = {"a": {"share": 0.5, "list": [0.4, 0.9], "time": "4us"}}
    factors = {"a": {"share": 1.5, "list": 1.2, "time": 0.5}, "source": "fitted"}
    found = trained(content | {"training": factors}, where="x.yaml")
    assert found["a"] == {"share": 0.75, "list": [pytest.approx(0.48), 1.0], "time": "2us"}


@pytest.mark.parametrize(
    ("factors", "field"),
    [
        ({"a": {"none": 1.1}}, "training.a.none"),
        ({"a": {"share": 0}}, "training.a.share"),
        ({"b": {"share": 1.1}}, "training.b"),
        ([1.1], "training"),
    ],
)
def test_a_factor_of_nothing_is_refused_by_name(factors: object, field: str) -> None:
    with pytest.raises(CostModelError) as problem:
        trained({"a": {"share": 0.5}, "training": factors}, where="x.yaml")
    assert problem.value.field == field


def test_another_chip_does_not_inherit_the_factors() -> None:
    assert load_cluster("a100-pcie-8gpu").gpu.matmul == load_gpu("a100-pcie-80gb").matmul


@pytest.mark.parametrize(
    ("cluster", "chip"),
    [
        ("mosaicml-a100-40gb", "mosaicml-a100-80gb"),
        ("jean-zay-v100-16gb", "jean-zay-v100"),
        ("dgx-h200", "dgx-h100"),
    ],
)
def test_the_same_chip_with_other_memory_has_the_same_factors(cluster: str, chip: str) -> None:
    gpu = load_cluster(cluster).gpu
    alone = load_gpu(gpu.name).matmul.efficiency
    other = load_cluster(chip).gpu
    gained = other.matmul.efficiency / load_gpu(other.name).matmul.efficiency
    assert gained != 1
    assert gpu.matmul.efficiency / alone == pytest.approx(gained)


def test_what_stands_for_another_entry_has_the_factors_of_that_one() -> None:
    kernels = {"flash1": {"efficiency": 0.3}, "flash2": "flash1"}
    factors = {"kernels": {"flash1": {"efficiency": 0.5}, "flash2": {"efficiency": 2.0}}}
    found = trained({"attention": {"kernels": kernels}, "training": {"attention": factors}}, where="x.yaml")
    assert found["attention"]["kernels"] == {"flash1": {"efficiency": 0.15}, "flash2": "flash1"}

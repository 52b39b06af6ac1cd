"""The catalogues: every entry loads, every figure has a source and is plausible."""

from pathlib import Path

import pytest

import cost_models
from cost_models.clusters import ALIASES as CLUSTER_ALIASES
from cost_models.clusters import CLUSTERS
from cost_models.hardware import ALIASES as GPU_ALIASES
from cost_models.hardware import GPUS
from cost_models.stacks import ALIASES as STACK_ALIASES
from cost_models.stacks import STACKS
from cost_models.yaml_file import read_yaml

PACKAGE = Path(cost_models.__file__).parent
FOLDERS = {
    "hardware": (GPUS, GPU_ALIASES, cost_models.load_gpu),
    "clusters": (CLUSTERS, CLUSTER_ALIASES, cost_models.load_cluster),
    "stacks": (STACKS, STACK_ALIASES, cost_models.load_stack),
}
NAMES = [(folder, name) for folder, (table, _, _) in FOLDERS.items() for name in table]
ALIASES = [(folder, alias) for folder, (_, aliases, _) in FOLDERS.items() for alias in aliases]
REAL_GPUS = [name for name in GPUS if name != "cpu"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_table_lists_every_file_of_its_folder(folder):
    table = FOLDERS[folder][0]
    assert sorted(table.values()) == sorted(path.name for path in (PACKAGE / folder).glob("*.yaml"))


@pytest.mark.parametrize(("folder", "name"), NAMES)
def test_every_entry_loads_under_its_lower_case_name_in_any_case(folder, name):
    load = FOLDERS[folder][2]
    assert name == name.lower()
    assert load(name).name == name
    assert load(name.upper()) == load(name)


@pytest.mark.parametrize(("folder", "alias"), ALIASES)
def test_every_alias_is_lower_case_and_leads_to_an_entry(folder, alias):
    table, aliases, load = FOLDERS[folder]
    assert alias == alias.lower()
    assert alias not in table
    assert load(alias).name == aliases[alias]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("A100-SXM-40GB", "a100-sxm-40gb"),
        ("A100-SXM-80GB", "a100-sxm-80gb"),
        ("H100-SXM", "h100-sxm"),
        ("H100", "h100-sxm"),
        ("H200-SXM", "h200-sxm"),
        ("B200-SXM", "b200-sxm"),
    ],
)
def test_gpu_names_of_published_tables_resolve(text, name):
    assert cost_models.load_gpu(text).name == name


@pytest.mark.parametrize(
    ("text", "name"), [("DGX-A100", "dgx-a100"), ("Selene", "dgx-a100"), ("DGX-H100", "dgx-h100")]
)
def test_cluster_names_of_published_tables_resolve(text, name):
    assert cost_models.load_cluster(text).name == name


def figures_without_source(content, path=""):
    """Yield the dotted names of mappings that hold figures but have no source in them or around them."""
    if content.get("source"):
        return
    for key, value in content.items():
        if isinstance(value, dict):
            yield from figures_without_source(value, f"{path}.{key}")
        elif key not in {"schema_version", "name", "description", "extends", "gpu", "max_nodes"}:
            yield f"{path}.{key}"


@pytest.mark.parametrize(("folder", "name"), NAMES)
def test_every_figure_has_a_source(folder, name):
    content = read_yaml(PACKAGE / folder / FOLDERS[folder][0][name])
    content = {key: value for key, value in content.items() if key not in {"model", "strategy"}}
    assert list(figures_without_source(content)) == []


@pytest.mark.parametrize("name", REAL_GPUS)
def test_peaks_and_bandwidths_of_gpus_are_plausible(name):
    gpu = cost_models.load_gpu(name)
    assert 300e12 <= gpu.peak("bf16") <= 3000e12
    assert gpu.peak("fp32") < gpu.peak("tf32") < gpu.peak("bf16")
    assert 1.5e12 <= gpu.memory_bytes_per_s <= 8e12
    assert 39 * 2**30 <= gpu.usable_bytes <= gpu.memory_bytes <= 192 * 2**30
    assert 100 <= gpu.peak("bf16") / gpu.memory_bytes_per_s <= 400
    assert 0.4 <= gpu.matmul.efficiency <= 0.8


@pytest.mark.parametrize("name", [name for name in CLUSTERS if name != "local-cpu"])
def test_links_of_clusters_are_plausible(name):
    cluster = cost_models.load_cluster(name)
    assert cluster.gpus_per_node == 8
    assert 250e9 <= cluster.intra.bandwidth_bytes_per_s <= 900e9
    assert 25e9 <= cluster.network_share(1) <= 50e9
    for curve in (*cluster.curves.values(), cluster.transfer_curve):
        assert 0.6 <= curve.bandwidth_bytes_per_s / cluster.intra.bandwidth_bytes_per_s <= 1


def test_the_dense_bf16_peak_of_h100_is_the_vendor_figure():
    assert cost_models.load_gpu("h100").peak_flops_per_s["bf16"] == 989.4e12


def test_single_nodes_are_bounded_and_dgx_clusters_are_not():
    assert cost_models.load_cluster("h100-8gpu").max_gpus == 8
    assert cost_models.load_cluster("dgx-h100").max_gpus is None
    assert cost_models.load_cluster("h100-8gpu").curves == cost_models.load_cluster("dgx-h100").curves


def test_the_stack_gives_its_other_sections_as_plain_data():
    stack = cost_models.load_stack("piper")
    assert stack.launch_overhead_s == pytest.approx(10e-6)
    assert stack.strategy["gradient_dtype"] == "fp32"
    assert stack.model["attention_kernel"] == "flash"
    assert set(stack.sources) == {"cost"}

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
        ("V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("V100-SXM2-32GB", "v100-sxm2-32gb"),
        ("A100-PCIe-80GB", "a100-pcie-80gb"),
        ("H100-SXM-96GB", "h100-sxm-96gb"),
        ("H100-NVL/PCIe", "h100-nvl"),
        ("B300-SXM", "b300-sxm"),
        ("GB200", "gb200"),
        ("GB300", "gb300"),
        ("RTX-PRO-6000-BW", "rtx-pro-6000-bw-server"),
    ],
)
def test_gpu_names_of_published_tables_resolve(text, name):
    assert cost_models.load_gpu(text).name == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("DGX-A100", "dgx-a100"),
        ("Selene", "selene"),
        ("DGX-H100", "dgx-h100"),
        ("DGX-1V (V100)", "dgx-1v"),
        ("GB200-NVL72", "gb200-nvl72"),
        ("AWS p4d.24xlarge", "p4d-24xlarge"),
        ("Azure ND A100 v4", "azure-nd-a100-v4"),
        ("PCIe4 box (L40S x8)", "l40s-8gpu"),
        ("ALCF Polaris", "polaris"),
    ],
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
    half = gpu.peak("fp16")
    peaks = [gpu.peak_flops_per_s.get(dtype, 0) for dtype in ("fp32", "tf32", "bf16", "fp8")]
    assert 60e12 <= half <= 3000e12
    assert gpu.peak_flops_per_s.get("bf16", half) == half
    assert [peak for peak in peaks if peak] == sorted(peak for peak in peaks if peak)
    assert 0.3e12 <= gpu.memory_bytes_per_s <= 8e12
    assert 0.9 * gpu.memory_bytes <= gpu.usable_bytes <= gpu.memory_bytes <= 288 * 2**30
    assert 35 <= half / gpu.memory_bytes_per_s <= 450
    assert 0.4 <= gpu.matmul.efficiency <= 0.8


@pytest.mark.parametrize("name", [name for name in GPUS if name.startswith(("v100", "t4"))])
def test_volta_and_turing_have_no_bf16(name):
    assert "bf16" not in cost_models.load_gpu(name).peak_flops_per_s


@pytest.mark.parametrize(
    ("new", "measured"), [("gb300", "b300-sxm"), ("rtx-a6000", "a40"), ("l4", "l40s"), ("h20", "h100-sxm")]
)
def test_what_is_taken_over_from_another_gpu_says_so_and_is_less_certain(new, measured):
    gpu, base = cost_models.load_gpu(new), cost_models.load_gpu(measured)
    assert gpu.matmul.efficiency == base.matmul.efficiency
    assert gpu.matmul.error > base.matmul.error
    assert gpu.matmul.fitted_dtypes == ()
    assert gpu.sources["matmul"].startswith("Taken over from")
    assert base.sources["matmul"] in gpu.sources["matmul"]


@pytest.mark.parametrize("name", [name for name in CLUSTERS if name != "local-cpu"])
def test_links_of_clusters_are_plausible(name):
    cluster = cost_models.load_cluster(name)
    assert cluster.gpus_per_node in {4, 8, 16}
    assert 30e9 <= cluster.intra.bandwidth_bytes_per_s <= 900e9
    assert 1.5e9 <= cluster.network_share(1) <= 100e9
    slow = "pcie" in cluster.sources["intra"].lower() or "bridge" in cluster.sources["intra"]
    for curve in (*cluster.curves.values(), cluster.transfer_curve):
        share = curve.bandwidth_bytes_per_s / cluster.intra.bandwidth_bytes_per_s
        assert (0.03 if slow else 0.1) <= share <= 1


def test_figures_of_a_section_are_taken_over_with_both_sources():
    below, cluster = cost_models.load_cluster("dgx-a100"), cost_models.load_cluster("vtrain-a100")
    assert cluster.network_share(8) == 100e9
    assert cluster.network().tree_latency_s == below.network().tree_latency_s
    assert cluster.sources["inter"].startswith("800 Gb/s per node")
    assert cluster.sources["inter"].endswith(f"Otherwise as dgx-a100: {below.sources['inter']}")


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

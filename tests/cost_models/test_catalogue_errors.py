"""A catalogue name or file that cannot be used says what is wrong and how to mend it."""

import pytest

from cost_models import load_cluster, load_gpu, load_stack
from cost_models.errors import CostModelError
from cost_models.topology import Channels, Spine


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="mine.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write_file


GPU = "schema_version: 1\nname: mine\nextends: h100-sxm\n"
CLUSTER = "schema_version: 1\nname: mine\nextends: dgx-h100\n"
STACK = "schema_version: 1\nname: mine\nextends: piper\n"


def caught(load, text):
    with pytest.raises(CostModelError) as problem:
        load(text)
    return problem.value


@pytest.mark.parametrize(
    ("load", "name", "hint"),
    [
        (load_gpu, "h100-smx", "'h100-sxm'"),
        (load_cluster, "dgx-h1000", "'dgx-h100'"),
        (load_stack, "pipper", "'piper'"),
    ],
)
def test_an_unknown_name_gets_a_did_you_mean(load, name, hint):
    error = caught(load, name)
    assert error.value == name
    assert error.field == "name"
    assert f"did you mean {hint}" in error.fix
    assert "YAML file" in error.fix


def test_a_name_like_no_other_lists_all(tmp_path):
    fix = caught(load_gpu, "zzz").fix
    assert "known: v100-sxm2-16gb" in fix
    assert "a100-40gb" not in fix  # another name of an entry


def test_a_missing_file_is_named(tmp_path):
    error = caught(load_gpu, str(tmp_path / "none.yaml"))
    assert error.where.endswith("none.yaml")
    assert error.rule == "does not exist"


def test_a_folder_is_not_a_file(tmp_path):
    folder = tmp_path / "folder.yaml"
    folder.mkdir()
    assert "cannot be read" in caught(load_gpu, str(folder)).rule


def test_broken_yaml_names_line_and_column(write):
    path = write("schema_version: 1\nname: mine\npeak: [1, 2\nmemory: }\n")
    error = caught(load_gpu, path)
    assert error.where.startswith(f"{path}:4:")
    assert (error.field, error.value) == ("file", str(path))
    assert "is not valid YAML" in error.rule
    assert "indentation" in error.fix


def test_a_key_given_twice_is_broken_yaml(write):
    assert "duplicate key" in caught(load_gpu, write(GPU + "name: again\n")).rule


@pytest.mark.parametrize("text", ["- a\n- b\n", "text", ""])
def test_a_file_must_be_a_mapping(write, text):
    assert caught(load_gpu, write(text)).rule == "must be a mapping"


@pytest.mark.parametrize("version", ["2", "true", "one", "null"])
def test_another_schema_version_is_refused(write, version):
    error = caught(load_gpu, write(f"schema_version: {version}\nname: mine\n"))
    assert error.field == "schema_version"
    assert error.fix == "write schema_version: 1"


@pytest.mark.parametrize("text", ["intra: {inherit: false, source: me}", "host: {inherit: true, source: me}"])
def test_only_a_section_of_the_extended_file_can_be_inherited(write, text):
    error = caught(load_cluster, write(CLUSTER + text + "\n"))
    assert error.field == f"{text.split(':')[0]}.inherit"
    assert "leave inherit out" in error.fix


def test_an_inherited_section_needs_a_source_of_its_own(write):
    error = caught(load_cluster, write(CLUSTER + "intra: {inherit: true, bandwidth: 400GB/s}\n"))
    assert (error.field, error.rule) == ("intra.source", "is missing")


def test_a_file_without_a_section_says_which(write):
    error = caught(load_gpu, write("schema_version: 1\nname: mine\ndescription: mine\n"))
    assert (error.field, error.rule, error.fix) == ("chip", "is missing", "add the key")


@pytest.mark.parametrize(
    ("load", "text", "field", "hint"),
    [
        (load_gpu, GPU + "peek: 1\n", "peek", "'peak'"),
        (load_gpu, GPU + "chip: {procesors: 1, source: me}\n", "chip.procesors", "'processors'"),
        (load_gpu, GPU + "peak: {bf61: 1TFLOP/s, source: me}\n", "peak.bf61", "'bf16'"),
        (load_cluster, CLUSTER + "max_node: 2\n", "max_node", "'max_nodes'"),
        (load_cluster, CLUSTER + "intra: {bandwith: 1GB/s, source: me}\n", "intra.bandwith", "'bandwidth'"),
        (load_cluster, CLUSTER + "channels: {rings: 8, source: me}\n", "channels.rings", "'ring'"),
        (
            load_stack,
            STACK + "cost: {launch_overhed: 1us, source: me}\n",
            "cost.launch_overhed",
            "'launch_overhead'",
        ),
    ],
)
def test_an_unknown_key_gets_a_did_you_mean(write, load, text, field, hint):
    error = caught(load, write(text))
    assert error.field == field
    assert error.rule == "is not known"
    assert hint in error.fix


@pytest.mark.parametrize("value", ["0", "-1GB/s", ".nan", ".inf", "true", "null", "fast", "[1]", "12GiB"])
def test_a_bandwidth_must_be_a_positive_rate(write, value):
    error = caught(
        load_cluster, write(CLUSTER + f"intra: {{bandwidth: {value}, latency: 1us, source: me}}\n")
    )
    assert error.field == "intra.bandwidth"
    assert "50GB/s" in error.fix


@pytest.mark.parametrize("value", ["0", "-1", "1.5", ".nan", "true", "eight", "null"])
def test_a_count_must_be_a_whole_number(write, value):
    error = caught(load_cluster, write(CLUSTER + f"gpus_per_node: {value}\n"))
    assert error.field == "gpus_per_node"
    assert error.rule == "must be a whole number >= 1"


@pytest.mark.parametrize("field", ["efficiency", "wgrad_efficiency"])
def test_efficiencies_of_groups_that_grow_faster_than_the_rows_are_refused(write, field):
    values = {"efficiency": "[0.2, 0.3, 0.4]", "wgrad_efficiency": "[0.2, 0.3, 0.4]"} | {
        field: "[0.1, 0.3, 0.4]"
    }
    lists = ", ".join(f"{name}: {value}" for name, value in values.items())
    section = f"grouped_matmul: {{rows: [256, 1024], {lists}, error: 0.1, provenance: fitted, source: me}}\n"
    error = caught(load_gpu, write(GPU + section))
    assert (error.field, error.value) == (f"grouped_matmul.{field}", [0.1, 0.3, 0.4])
    assert "faster than the rows" in error.rule


def test_the_link_to_the_host_is_read_and_checked(write):
    figures = "bandwidth: 1GB/s, efficiency: {}, latency: 0us, error: 0.1, provenance: fitted, source: me"
    link = load_gpu(write(GPU + f"host_link: {{{figures.format(0.5)}}}\n")).host_link
    assert (link.bandwidth_bytes_per_s, link.efficiency, link.latency_s) == (1e9, 0.5, 0)
    section = f"host_link: {{{figures.format(2)}}}\n"
    assert caught(load_gpu, write(GPU + section)).field == "host_link.efficiency"


MATMUL = (
    "matmul: {{efficiency: {}, batched_efficiency: 0.4, misaligned_slowdown: 3, bandwidth_fraction: 0.7, "
    "latency: 1us, wgrad_slowdown: 1, error: {}, "
    "fitted_dtypes: {}, source: me}}\n"
)


@pytest.mark.parametrize("value", ["0", "-0.5", "1.2", ".nan", "true", "good", "null"])
def test_an_efficiency_must_be_a_fraction(write, value):
    error = caught(load_gpu, write(GPU + MATMUL.format(value, 0.1, "[]")))
    assert error.field == "matmul.efficiency"
    assert error.rule == "must be a number > 0 and <= 1"
    assert error.fix == "write a plain number"


@pytest.mark.parametrize("value", ["0", "1", "25", ".nan"])
def test_an_error_must_be_a_fraction_below_one(write, value):
    assert caught(load_gpu, write(GPU + MATMUL.format(0.7, value, "[]"))).field == "matmul.error"


@pytest.mark.parametrize("value", ["bf16", "[16]"])
def test_fitted_dtypes_must_be_a_list_of_texts(write, value):
    error = caught(load_gpu, write(GPU + MATMUL.format(0.7, 0.1, value)))
    assert error.field == "matmul.fitted_dtypes"
    assert "must be a list" in error.rule


@pytest.mark.parametrize("source", ["", "source: ''", "source: '  '", "source: 7"])
def test_figures_without_source_are_refused(write, source):
    text = GPU + f"chip:\n  processors: 132\n  asynchronous: true\n  {source}\n"
    error = caught(load_gpu, write(text))
    assert error.field == "chip.source"
    assert error.fix == "say where the figures come from"


def test_a_flag_must_be_true_or_false(write):
    error = caught(load_gpu, write(GPU + "chip: {processors: 1, asynchronous: 1, source: me}\n"))
    assert (error.field, error.rule) == ("chip.asynchronous", "must be true or false")


def test_a_section_must_be_a_mapping(write):
    error = caught(load_gpu, write(GPU + "chip: 132\n"))
    assert (error.field, error.rule) == ("chip", "must be a mapping")


def test_plain_data_of_a_stack_must_be_a_mapping(write):
    error = caught(load_stack, write(STACK + "model: fast\n"))
    assert (error.field, error.rule) == ("model", "must be a mapping")


def test_usable_memory_must_lie_between_context_and_capacity(write):
    text = "memory: {capacity: 80GiB, usable: 90GiB, bandwidth: 1TB/s, context: 1GiB, source: me}\n"
    error = caught(load_gpu, write(GPU + text))
    assert error.field == "memory.usable"
    assert "mem_get_info" in error.fix


def test_grouped_efficiencies_must_match_their_limits(write):
    text = "grouped_matmul: {rows: [8], efficiency: [0.1], wgrad_efficiency: [0.1, 0.2], error: 0.1, "
    error = caught(load_gpu, write(GPU + text + "provenance: fitted, source: me}\n"))
    assert error.field == "grouped_matmul.efficiency"


def test_an_unknown_provenance_gets_a_did_you_mean(write):
    text = "grouped_matmul: {rows: [8], efficiency: [0.1, 0.2], wgrad_efficiency: [0.1, 0.2], error: 0.1, "
    error = caught(load_gpu, write(GPU + text + "provenance: guessed, source: me}\n"))
    assert error.field == "grouped_matmul.provenance"


def test_a_collective_cannot_be_faster_than_its_link(write):
    error = caught(load_cluster, write(CLUSTER + "intra: {bandwidth: 100GB/s, latency: 1us, source: me}\n"))
    assert error.field == "intra_collectives.all_reduce.bandwidth"
    assert "must not exceed the link" in error.rule


def test_channels_that_a_file_does_not_name_are_those_of_the_library(write):
    cluster = load_cluster(write(CLUSTER + "channels: {ring: 8, source: me}\n"))
    assert cluster.channels == Channels(ring=8)
    assert cluster.sources["channels"] == "me"


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many", "true"])
def test_channels_must_be_whole_numbers(write, value):
    error = caught(load_cluster, write(CLUSTER + f"channels: {{per_rail: {value}, source: me}}\n"))
    assert (error.field, error.rule) == ("channels.per_rail", "must be a whole number >= 1")


def test_channels_leave_processors_for_the_computation(write):
    error = caught(load_cluster, write(CLUSTER + "channels: {messages: 132, source: me}\n"))
    assert (error.field, error.value) == ("channels.messages", 132)
    assert "below the 132 processors of h100-sxm" in error.rule


NETWORK = "inter: {{nics_per_node: 8, nic_bandwidth: 400Gb/s, nic_latency: 17us, source: me, spine: {}}}\n"


def test_a_spine_that_carries_less_is_read_and_checked(write):
    spine = "{nodes_per_leaf: 32, oversubscription: 2}"
    cluster = load_cluster(write(CLUSTER + NETWORK.format(spine)))
    assert cluster.network().spine == Spine(nodes_per_leaf=32, oversubscription=2.0)
    assert load_cluster("dgx-h100").network().spine is None
    for spine, field in (
        ("{nodes_per_leaf: 0, oversubscription: 2}", "inter.spine.nodes_per_leaf"),
        ("{nodes_per_leaf: 32, oversubscription: 0}", "inter.spine.oversubscription"),
        ("{nodes_per_leaf: 32}", "inter.spine.oversubscription"),
        ("{nodes_per_leafs: 32, oversubscription: 2}", "inter.spine.nodes_per_leafs"),
        ("2", "inter.spine"),
    ):
        assert caught(load_cluster, write(CLUSTER + NETWORK.format(spine))).field == field


def test_devices_that_share_a_link_to_the_host_must_fill_the_node(write):
    assert load_cluster(write(CLUSTER + "host: {gpus_per_link: 2, source: me}\n")).gpus_per_host_link == 2
    error = caught(load_cluster, write(CLUSTER + "host: {gpus_per_link: 3, source: me}\n"))
    assert (error.field, error.value) == ("host.gpus_per_link", 3)
    assert "must divide the 8 GPUs of a node" in error.rule


@pytest.mark.parametrize("value", ["11us", "[33us, 11us]", "[1us]", "[-1us, 2us]"])
def test_a_latency_pair_must_rise(write, value):
    text = (
        "inter_collectives: {ring_efficiency: 0.9, all_to_all_efficiency: 0.9, transfer_efficiency: 0.8, "
        f"ring_latency: {value}, tree_latency: [1us, 2us], peer_latency: [1us, 2us], protocol_switch: 1MiB, "
        "two_node_tree: false, large_from: 1MiB, large_error: 0.1, small_error: 0.5, provenance: fitted, "
        "source: me}\n"
    )
    assert caught(load_cluster, write(CLUSTER + text)).field == "inter_collectives.ring_latency"


def test_an_unknown_gpu_of_a_cluster_gets_a_did_you_mean(write):
    assert "'h100-sxm'" in caught(load_cluster, write(CLUSTER + "gpu: h100-smx\n")).fix
    assert caught(load_cluster, write(CLUSTER + "gpu: 100\n")).field == "gpu"


def test_a_cluster_without_a_network_has_one_node(write):
    text = (
        "schema_version: 1\nname: mine\ndescription: mine\ngpu: h100\ngpus_per_node: 2\neager_limit: 0\n"
        "source: me\ncommunicators: {pair: 1MiB, group: 1MiB, source: me}\n"
        "intra: {bandwidth: 100GB/s, latency: 1us, source: me}\nintra_collectives:\n"
        + "".join(
            f"  {kind}: {{base: 1us, per_rank: 1us, sqrt: 0us, bandwidth: 80GB/s, error: 0.2}}\n"
            for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "transfer")
        )
        + "  provenance: datasheet\n  source: me\n"
    )
    error = caught(load_cluster, write(text))
    assert error.field == "max_nodes"
    assert "inter_collectives" in error.fix
    assert load_cluster(write(text + "max_nodes: 1\n")).max_gpus == 2


@pytest.mark.parametrize("base", ["mine.yaml", "[1]"])
def test_a_file_cannot_extend_itself(write, base):
    error = caught(load_gpu, write(f"schema_version: 1\nname: mine\nextends: {base}\n"))
    assert error.field == "extends"


def test_a_cluster_finds_its_gpu_beside_its_file(write):
    write(GPU + "chip: {processors: 99, asynchronous: true, source: me}\n", "gpu.yaml")
    base = write(CLUSTER + "gpu: gpu.yaml\n", "base.yaml")
    assert load_cluster(base).gpu.processors == 99
    assert load_cluster(base).gpu.matmul == load_gpu("h100").matmul
    child = write("schema_version: 1\nname: child\nextends: base.yaml\nmax_nodes: 3\n", "child.yaml")
    assert (load_cluster(child).gpu.processors, load_cluster(child).max_gpus) == (99, 24)


@pytest.mark.parametrize("value", [".nan", ".inf", "2020-01-01", "[1, .nan]", "{deep: .inf}"])
@pytest.mark.parametrize("section", ["model", "strategy"])
def test_plain_data_of_a_stack_must_be_text_or_finite(write, section, value):
    error = caught(load_stack, write(STACK + f"{section}:\n  figure: {value}\n"))
    assert error.field.startswith(f"{section}.figure")
    assert error.rule == "must be a text or a finite number"
    assert "quote" in error.fix


ATTENTION = """attention:
  best: {best}
  kernels:
    flash1: {flash1}
    flash2: {{efficiency: 0.3, half_length: 300, backward_ratio: 3, head64_factor: 0.8}}
    flash3: flash2
    cudnn: flash2
  wave_penalty: 0
  latency: 15us
  error: 0.3
  fitted_dtypes: [bf16]
  source: me
"""


@pytest.mark.parametrize(
    ("best", "flash1", "field", "hint"),
    [
        ("flash4", "flash2", "attention.best", "flash1"),
        ("flash2", "flash3", "attention.kernels.flash1", "flash2"),
        ("flash2", "{efficiency: 2}", "attention.kernels.flash1.efficiency", "plain number"),
    ],
)
def test_a_class_of_attention_kernels_has_figures_or_names_one_that_has(write, best, flash1, field, hint):
    error = caught(load_gpu, write(GPU + ATTENTION.format(best=best, flash1=flash1)))
    assert error.field == field
    assert hint in error.fix

"""`piper import nccl-tests`: what a log says becomes a cluster file; a log that says nothing is refused."""

import json

import pytest

from cost_models import CollectiveKind, Provenance, cluster_cost_model, load_cluster
from piper.cli import main
from piper.errors import JobError
from piper.interop import nccl_tests

COLUMNS = """\
#                                                              out-of-place                       in-place
#       size        count     type  redop   root     time  algbw  busbw #wrong    time  algbw  busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
TIMES = {1024: 20.5, 1048576: 31.81, 2097152: 35.61, 536870912: 1977.22}
FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "sendrecv": lambda n: 1.0,
}
REDUCTIONS = {"all_reduce": "sum", "reduce_scatter": "sum", "sendrecv": "sum"}


def head(*, nodes=1, each=8, device="NVIDIA H100 80GB HBM3"):
    lines = [
        "# nThread 1 nGpus 1 minBytes 8 maxBytes 536870912 step: 2(factor) warmup iters: 5 iters: 20",
        "#",
    ]
    lines.append("# Using devices")
    for rank in range(nodes * each):
        place = f"node{rank // each} device {rank % each} [0x{rank % each}0]"
        lines.append(f"#  Rank {rank:2} Group  0 Pid   {1000 + rank} on  {place} {device}")
    return "\n".join(lines) + "\n#\n" + COLUMNS


def row(size, out_us, in_us, *, op, ranks, wrong="0"):
    cells = [str(size), str(size // 4), "float", REDUCTIONS.get(op, "none"), "-1"]
    for time_us in (out_us, in_us):
        rate = size / time_us / 1e3
        bus = rate * FACTORS[op](ranks)
        cells += [f"{time_us:.2f}", f"{rate:.2f}", f"{bus:.2f}", wrong]
    return "  ".join(cells) + "\n"


def log(op="all_reduce", *, nodes=1, each=8, times=None, device="NVIDIA H100 80GB HBM3", said=False):
    start = f"# Collective test starting: {op}_perf\n" if said else ""
    rows = [row(size, t, 1.01 * t, op=op, ranks=nodes * each) for size, t in (times or TIMES).items()]
    return (
        start
        + head(nodes=nodes, each=each, device=device)
        + "".join(rows)
        + "# Out of bounds values : 0 OK\n"
    )


@pytest.fixture
def write(tmp_path):
    def write_log(text, name="job.log"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write_log


def imported(path, **options):
    return nccl_tests.read([path] if isinstance(path, str) else path, name="ours", **options)


def test_the_file_prices_measured_sizes_as_measured(write, tmp_path, capsys):
    logs = [write(log()), write(log("alltoall", nodes=2, said=True), "two.log")]
    file = tmp_path / "ours.yaml"
    assert main(["import", "nccl-tests", *logs, "--cluster", "dgx-h100", "-o", str(file)]) == 0
    assert capsys.readouterr().out == f"wrote {file}\n"
    prices = cluster_cost_model(str(file))
    assert prices.cluster.name == "ours"
    for size, time_us in TIMES.items():
        inside = prices.collective(CollectiveKind.ALL_REDUCE, size_bytes=size, ranks=range(8))
        across = prices.collective(CollectiveKind.ALL_TO_ALL, size_bytes=size, ranks=range(16))
        assert (inside.seconds, across.seconds) == (pytest.approx(time_us * 1e-6, rel=1e-12),) * 2
        assert inside.provenance is across.provenance is Provenance.MEASURED


def test_a_simulation_takes_the_times_of_the_file(write, tmp_path, capsys):
    """All-reduces become a thousand times as long as in the catalogue, and the step longer."""
    ours = load_cluster("dgx-h100").in_switch.measured.series[1, 8]
    times = {round(w / 1.75): 1e9 * s for w, s in zip(ours.sizes_bytes, ours.seconds, strict=True)}
    file = str(tmp_path / "slow.yaml")
    assert main(["import", "nccl-tests", write(log(times=times, said=True)), "-o", file]) == 0
    capsys.readouterr()
    found = []
    for cluster in ("dgx-h100", file):
        job = ["tiny-llama", "--gpus", "8", "--strategy", "dp=8", "--global-batch", "8", "--json"]
        assert main(["simulate", *job, "--cluster", cluster]) == 0
        found.append(json.loads(capsys.readouterr().out)["step_time_s"])
    assert found[1] > 1.5 * found[0]


def test_other_groups_keep_the_times_of_the_extended_cluster(write, tmp_path):
    file = tmp_path / "ours.yaml"
    file.write_text(imported(write(log())).text)
    mine, base = cluster_cost_model(str(file)), cluster_cost_model("dgx-h100")
    for kind, ranks in ((CollectiveKind.ALL_REDUCE, range(4)), (CollectiveKind.ALL_GATHER, range(8))):
        assert (
            mine.collective(kind, size_bytes=2**20, ranks=ranks).seconds
            == base.collective(kind, size_bytes=2**20, ranks=ranks).seconds
        )


@pytest.mark.parametrize("program", nccl_tests.PROGRAMS)
def test_the_test_is_known_by_what_the_log_or_its_name_says(write, program):
    op = nccl_tests.PROGRAMS[program]
    for path in (write(log(program, said=True), "a.log"), write(log(program), f"{program}_perf.txt")):
        assert list(imported(path).series) == [(op, 1, 2 if op == "transfer" else 8)]


def test_all_reduce_and_reduce_scatter_are_known_by_their_columns(write):
    assert list(imported(write(log("all_reduce"))).series) == [("all_reduce", 1, 8)]
    assert list(imported(write(log("reduce_scatter"))).series) == [("reduce_scatter", 1, 8)]


def test_what_the_columns_leave_open_is_asked_for(write):
    path = write(log("all_gather"))
    with pytest.raises(JobError) as caught:
        imported(path)
    assert caught.value.rule == "do not say which test they are of: all_gather or alltoall"
    assert "--op" in caught.value.fix
    assert list(imported(path, op="alltoall").series) == [("all_to_all", 1, 8)]


def test_the_in_place_times_are_taken_when_asked_for(write):
    times = imported(write(log()), column="in-place").series["all_reduce", 1, 8]
    assert times[1048576] == pytest.approx(32.13)


def test_the_prefix_of_mpirun_and_the_columns_of_old_versions_are_read(write):
    plain = log()
    prefixed = "".join(f"[1,0]<stdout>:{line}\n" for line in plain.splitlines())
    assert imported(write(prefixed)).series == imported(write(plain)).series
    old = head().replace("Group  0 ", "") + "1024 256 float sum 20.50 0.05 0.09 4e-07 20.70 0.05 0.09 4e-07\n"
    assert imported(write(old), op="all_reduce").series == {("all_reduce", 1, 8): {1024: 20.5}}


def test_a_log_of_several_tests_gives_a_series_of_each(write):
    text = (
        log("all_gather", said=True) + log("reduce_scatter", nodes=2, said=True) + log("sendrecv", said=True)
    )
    found = imported(write(text)).series
    assert list(found) == [("all_gather", 1, 8), ("reduce_scatter", 2, 8), ("transfer", 1, 2)]


def test_sends_to_the_next_rank_are_transfers_inside_a_node_and_between_nodes(write, tmp_path):
    file = tmp_path / "ours.yaml"
    near, far = write(log("sendrecv", said=True)), write(log("sendrecv", nodes=2, said=True), "b.log")
    file.write_text(imported([near, far]).text)
    prices = cluster_cost_model(str(file))
    for target in (1, 8):
        price = prices.transfer(size_bytes=1048576, source_rank=0, target_rank=target)
        assert (price.seconds, price.provenance) == (pytest.approx(31.81e-6), Provenance.MEASURED)


def test_the_cluster_and_the_size_of_its_gpus_are_taken_from_the_log(write, tmp_path):
    found = imported(write(log(device="NVIDIA A100-SXM4-40GB")))
    file = tmp_path / "ours.yaml"
    file.write_text(found.text)
    assert found.cluster == "dgx-a100"
    assert load_cluster(str(file)).gpu.name == "a100-sxm-40gb"
    assert any("40gb" in notice for notice in found.notices)


def test_more_gpus_on_a_node_than_the_cluster_has_make_larger_nodes(write, tmp_path):
    file = tmp_path / "ours.yaml"
    file.write_text(imported(write(log(each=16, device="GPU"))).text)
    assert load_cluster(str(file)).gpus_per_node == 16


def test_ranks_of_a_rack_are_one_nvlink_domain(write):
    assert list(imported(write(log(nodes=4, each=4, device="NVIDIA GB200"))).series) == [
        ("all_reduce", 1, 16)
    ]


def test_bandwidth_that_falls_with_size_is_said_and_both_times_are_kept(write):
    times = {33554432: 2180.1, 67108864: 24410.0}
    found = imported(write(log(times=times)))
    assert found.series["all_reduce", 1, 8] == times
    (warning,) = found.warnings
    assert "falls from 26.93 GB/s at 33554432 bytes to 4.81 GB/s at 67108864 bytes" in warning


def test_columns_of_another_number_of_ranks_are_said(write):
    """The log lists 8 ranks, its bandwidths are those of 16."""
    text = head() + "".join(row(size, t, t, op="all_reduce", ranks=16) for size, t in TIMES.items())
    (warning,) = imported(write(text)).warnings
    assert "busbw / algbw is 1.875, but 1.750 with the 8 ranks" in warning


@pytest.mark.parametrize(
    ("text", "field", "rule"),
    [
        ("", "rows", "no measurements found"),
        (head(), "rows", "no measurements found"),
        (log()[:-60], "columns", "has not the 12 or 13 columns of nccl-tests (cut?)"),
        (COLUMNS + row(1024, 20, 20, op="all_reduce", ranks=8), "Rank", None),
        (log() + row(1024, 20, 20, op="all_reduce", ranks=8), "size", "is given twice"),
        (head() + row(1024, 20, 20, op="all_reduce", ranks=8, wrong="3"), "#wrong", "must be 0"),
        (log().replace("31.81", "318.10"), "algbw", None),
        (log().replace("31.81", "nan"), "column", "must be a number >= 0"),
        (log() + "node0: Test NCCL failure common.cu:958 'unhandled system error'\n", "line", None),
        (log().replace("on  node0 device 7", "on  node1 device 7"), "Rank", None),
        ("# broadcast_perf\n" + log(), "test", "is not imported"),
        ("# alltoall_perf\n" + log(), "busbw / algbw", "cannot be that of alltoall: 0.5 to 1"),
    ],
)
def test_a_broken_log_is_refused_with_one_error(write, text, field, rule):
    with pytest.raises(JobError) as caught:
        imported(write(text))
    assert caught.value.field == field
    assert rule in {None, caught.value.rule}


def test_one_test_measured_twice_is_refused(write):
    with pytest.raises(JobError) as caught:
        imported([write(log(), "a.log"), write(log(), "b.log")])
    assert caught.value.rule == "of all_reduce of 8 GPUs is measured twice"


def test_several_nodes_need_a_cluster_with_a_network(write):
    with pytest.raises(JobError) as caught:
        imported(write(log(nodes=2)), cluster="h100-8gpu")
    assert caught.value.field == "--cluster"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import", "nccl-test", "a.log"], "nccl-tests"),
        (["import", "kineto", "a.json"], "is not available in this version"),
        (["import", "nccl-tests", "none.log"], "does not exist"),
        (["import", "nccl-tests", "a.log", "--column", "inplace"], "in-place"),
    ],
)
def test_what_cannot_be_imported_is_bad_input(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_the_file_is_printed_where_none_is_named_and_json_has_the_times(write, capsys):
    path = write(log(times={1024: 20.5}))
    assert main(["import", "nccl-tests", path, "--op", "all_reduce"]) == 0
    shown = capsys.readouterr()
    assert "        1024: 20.5us" in shown.out
    assert "notice: extends dgx-h100" in shown.err
    assert main(["import", "nccl-tests", path, "--op", "all_reduce", "--json"]) == 0
    (series,) = json.loads(capsys.readouterr().out)["series"]
    assert series == {
        "op": "all_reduce", "nodes": 1, "gpus_per_node": 8, "bytes": [1024], "time_us": [20.5],
    }  # fmt: skip

"""Measuring this machine: what comes out is a table that a cluster file can be fitted to."""

import json
from pathlib import Path

import pytest

from benchmarks import cpu_loop
from cost_models import load_cluster
from cost_models.calibration import read_table
from cost_models.calibration.table import COLLECTIVES
from piper.cli import main
from piper.errors import JobError
from piper.profiling import machine
from piper.profiling.cases import CPU, GPU, Sizes, cases, quick
from piper.profiling.clock import timing, typical
from piper.profiling.machine import Profiling, profile

SMALL = Sizes(
    dtypes=("fp32",),
    matmuls=((16, 16, 16), (64, 64, 64), (128, 128, 128)),
    batched=((4, 16, 16, 16),),
    attentions=((1, 2, 1, 16, 8),),
    rows=((64, 64), (512, 64)),
    elements=(64, 4096),
    parameters=(4096,),
    messages=(64, 65536),
)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small profile of this machine, through the command line."""
    path = tmp_path_factory.mktemp("profile") / "cpu.csv"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(machine.SIZES, "cpu", SMALL)
        patch.setattr(machine, "PROCESSES", (2,))
        patch.setattr(machine, "TOGETHER", (1, 2))
        assert main(["profile", "--device", "cpu", "--quick", "--time-limit", "5", "--out", str(path)]) == 0
    return path


def test_every_kind_is_measured(table: Path) -> None:
    rows = read_table(table)
    assert {row.op for row in rows} == {
        "matmul", "attention", "norm", "softmax", "cross_entropy", "embedding", "elementwise", "copy",
        "reduction", "optimizer", "contention", "pass", "message", *COLLECTIVES,
    }  # fmt: skip
    assert {row.direction for row in rows if row.op == "matmul"} == {"fwd", "dgrad", "wgrad"}
    assert len({row.device for row in rows}) == 1
    assert all(row.versions.startswith("torch ") and row.repeats >= 3 for row in rows)
    assert all(1e-8 < row.time_s < 1 for row in rows)


def test_a_larger_pass_takes_longer(table: Path) -> None:
    for direction in ("fwd", "bwd"):
        found = sorted(
            (row.shape[0], row.time_s)
            for row in read_table(table)
            if row.op == "pass" and row.direction == direction
        )
        assert found[-1][1] > found[0][1]


def test_a_cluster_file_is_fitted_to_it(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "here.yaml"
    assert main(["calibrate", str(table), "--out", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["base"] == "local-cpu"
    assert set(shown["errors"]) >= {"matmul", "elementwise", "all_reduce"}
    assert shown["host"]["stack"] == "piper"
    cluster = load_cluster(str(path))
    assert cluster.host.launch_s > 0
    assert cluster.host.cores is not None


def test_the_loop_ranks_what_it_predicts_as_it_measures(table: Path, tmp_path: Path) -> None:
    """Recomputing a whole forward: a difference that no disturbance hides."""
    strategies = ("dp=1,recompute=full", "dp=1")
    found = cpu_loop.loop(tmp_path, quick=True, table=str(table), strategies=strategies)
    assert found["slowest"] == {"predicted": strategies[0], "measured": strategies[0]}
    assert found["fastest"]["predicted"] == found["fastest"]["measured"]


def test_a_time_limit_leaves_kernels_out_and_says_so() -> None:
    said: list[str] = []
    asked = Profiling(device="cpu", limit_s=0.0, sizes=SMALL, report=said.append)
    rows = machine._kernels(asked)
    assert list(rows) == []
    assert "time limit" in said[-1]


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    with pytest.raises(JobError, match="torch finds no GPU"):
        next(iter(profile(Profiling(device="cuda"))))


@pytest.mark.parametrize("sizes", [CPU, GPU])
def test_a_quick_profile_measures_a_part_of_the_same_cases(sizes: Sizes) -> None:
    every, some = set(cases(sizes)), set(cases(quick(sizes)))
    assert some < every
    assert {case.op for case in some} == {case.op for case in every}


def test_typical_leaves_out_the_longest_quarter() -> None:
    samples = [1.0] * 6 + [100.0, 90.0]
    assert typical(samples).time_s == 1.0
    assert timing([1.0, 2.0, 9.0]).time_s == 2.0

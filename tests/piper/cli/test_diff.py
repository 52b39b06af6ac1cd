"""`piper calibrate` and `piper diff` around a recorded run."""

import json
from pathlib import Path

import pytest

from cost_models import load_cluster
from cost_models.calibration.anchor import BOUNDS
from piper.cli import main

JOB = ["--strategy", "pp=2", "--seq-len", "16", "--global-batch", "4", "--dtype", "fp32"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diff")
    assert main(["run", "tiny-llama", "--local", "2", *JOB, "--out", str(folder / "run")]) == 0
    simulated = ["simulate", str(folder / "run" / "plan.json.gz"), "--cluster", "local-cpu"]
    assert main([*simulated, "--out", str(folder / "sim")]) == 0
    return folder


def test_a_simulation_is_compared_with_the_run_of_its_plan(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(recorded / "sim"), str(recorded / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    run = json.loads((recorded / "run" / "result.json").read_text())
    times = [step["step_time_s"] for step in run["steps"][1:]]
    assert min(times) * 0.999 <= found["step_time_s"]["measured"] <= max(times) * 1.001
    kinds = {kind["kind"]: kind for kind in found["kinds"]}
    assert kinds["F"]["count"] == 8  # 4 microbatches on 2 stages
    shares = [kind["share"] for kind in kinds.values() if kind["share"] is not None]
    assert sum(shares) == pytest.approx(1.0)


def test_the_table_is_for_people(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(recorded / "sim"), str(recorded / "run")]) == 0
    out = capsys.readouterr().out
    assert "kind of task" in out
    assert "of the difference" in out


def test_a_cluster_is_anchored_to_the_run(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "anchored.yaml"
    given = ["--cluster", "local-cpu", "--from-trace", str(recorded / "run"), "--out", str(path)]
    assert main(["calibrate", *given, "--json"]) == 0
    anchor = json.loads(capsys.readouterr().out)["anchor"]
    for name, (low, high) in BOUNDS.items():
        assert low <= anchor["factors"][name] <= high
    assert "Anchored to one measured job" in load_cluster(str(path)).sources["cluster"]


def test_a_log_needs_the_model_that_it_is_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    log.write_text("step_time_s: 0.2\n")
    given = ["--from-log", str(log), "--out", str(tmp_path / "a.yaml")]
    assert main(["calibrate", *given]) == 2
    assert "--model" in capsys.readouterr().err
    assert main(["calibrate", *given, "--model", "tiny-llama", *JOB]) == 0
    assert "takes" in capsys.readouterr().out


def test_calibrate_without_measurements_says_what_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "--out", str(tmp_path / "a.yaml")]) == 2
    assert "piper profile" in capsys.readouterr().err

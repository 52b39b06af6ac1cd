"""`piper simulate --jitter`: the section of the result, its text, its picture, one error for each slip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import piper
from piper.cli import main

JOB = [
    "simulate",
    "tiny-llama",
    "--seq-len",
    "32",
    "--gpus",
    "4",
    "--global-batch",
    "8",
    "--strategy",
    "pp=2,dp=2",
]
JITTER = [
    "--jitter",
    "straggler:rank=1,factor=2",
    "--jitter",
    "noise:sigma=0.1",
    "--seed",
    "3",
    "--runs",
    "2",
]


def object_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_section_says_what_was_asked_what_came_out_and_who_is_to_blame(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = object_of([*JOB, *JITTER], capsys)
    section = found["jitter"]
    assert section["spec"] == "straggler:rank=1,factor=2;noise:sigma=0.1"
    assert (section["seed"], section["runs"], section["steps"]) == (3, 2, 4)
    mean_s, planned_s = section["step_time_s"]["mean"], section["undisturbed_step_time_s"]
    assert section["slowdown"] == pytest.approx(mean_s / planned_s)
    assert [entry["clause"] for entry in section["clauses"]] == section["spec"].split(";")
    assert len(section["units"]["first_rank"]) == section["n_units"] == 4
    assert sum(found["breakdown_s"].values()) == pytest.approx(found["step_time_s"], rel=1e-9)
    assert object_of([*JOB, *JITTER], capsys)["jitter"] == section


def test_the_text_tells_distribution_and_blame_and_the_files_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"--jitter-plot": "j.png", "--plot": "t.png", "--trace": "t.json", "--out": "out"}
    options = [word for option, name in names.items() for word in (option, str(tmp_path / name))]
    assert main([*JOB, *JITTER, *options]) == 0
    text = capsys.readouterr().out
    assert "jitter      straggler:rank=1,factor=2;noise:sigma=0.1" in text
    assert "2 runs of 4 steps from seed 3" in text
    assert "healthy it saves" in text
    assert all((tmp_path / name).exists() for name in names.values())
    assert piper.load_result(tmp_path / "out").summary["jitter"]["seed"] == 3


def test_the_api_gives_the_section_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    plan = piper.compile_plan("tiny-llama", "pp=2,dp=2", gpus=4, seq_len=32, global_batch=8)
    spec = ["straggler:rank=1,factor=2", "noise:sigma=0.1"]
    found = piper.simulate(plan, jitter=spec, seed=3, runs=2)
    assert found.summary["jitter"] == object_of([*JOB, *JITTER], capsys)["jitter"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--jitter", "nois:sigma=1"], "--jitter: kind = nois is not known"),
        (
            ["--jitter", "straggler:rank=4,factor=2"],
            "straggler.rank = 4 must be in 0..3: the job has 4 ranks",
        ),
        (["--seed", "1"], "--seed = 1 needs --jitter"),
        (["--runs", "1"], "--runs = 1 needs --jitter"),
        (["--jitter-plot", "f.png"], "--jitter-plot = f.png needs --jitter"),
    ],
)
def test_a_slip_is_one_error(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""

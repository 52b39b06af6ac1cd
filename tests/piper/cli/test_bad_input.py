"""Bad input: exit code 2, one message with field, value, rule and fix; nothing on stdout, no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from piper.cli import main

NUMBER_OPTIONS = ["--gpus", "--seq-len", "--global-batch", "--micro-batch", "--steps"]
NOT_WHOLE_NUMBERS = ["0", "-3", "nan", "1e3", "8.0", "abc", "", "inf", "٣"]  # the last one is an Arabic digit
SMALL = ["tiny-llama", "--seq-len", "32"]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """Run a command that must be refused; return what it says."""
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "\nfix: " in err
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("option", NUMBER_OPTIONS)
@pytest.mark.parametrize("value", NOT_WHOLE_NUMBERS)
def test_what_is_no_whole_number_from_one_is_refused(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    err = refused(["simulate", "tiny-llama", option, value], capsys)
    assert f"{option} = {value} must be a whole number >= 1" in err
    assert "fix: write a whole number such as" in err


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "abc"])
def test_a_norm_that_is_no_positive_number_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(["simulate", "tiny-llama", "--clip-grad-norm", value], capsys)
    assert f"--clip-grad-norm = {value} must be a number > 0" in err
    assert "fix: write a number such as 1.0" in err


USAGE = {
    "unknown command": (["simulte", "x"], "command = simulte is not a command", "did you mean 'simulate'?"),
    "unknown option": (
        ["simulate", "x", "--gpsu", "3"],
        "option = --gpsu is not an option of `piper simulate`",
        "'--gpus'",
    ),
    "missing argument": (["simulate"], "MODEL|PLAN = (nothing) must be given", "piper simulate --help"),
    "missing value": (["simulate", "x", "--gpus"], "--gpus = (nothing) cannot be used", "piper --help"),
    "one argument too many": (["simulate", "x", "y"], "unexpected extra argument", "piper simulate --help"),
    "unknown dtype": (["simulate", "tiny-llama", "--dtype", "bf61"], "dtype = bf61 is not known", "'bf16'"),
    "no strategy to compare": (
        ["compare", "tiny-llama"],
        "--strategy = (nothing) must be given",
        "--strategy dp=8",
    ),
    "result that is missing": (["report", "nowhere"], "RESULT = nowhere", "--out wrote"),
}

JOBS = {
    "unknown engine": (
        ["simulate", *SMALL, "--engine", "refrence"],
        "engine = refrence is not known",
        "'reference'",
    ),
    "unknown model": (["simulate", "lama3-8b"], "MODEL = lama3-8b", "'llama3-8b'"),
    "missing config": (
        ["simulate", "nowhere/config.json"],
        "nowhere/config.json does not exist",
        "config.json",
    ),
    "unknown GPU": (["gpus", "h1000"], "name = h1000 is not a known GPU", "'h100'"),
    "unknown cluster": (
        ["simulate", *SMALL, "--cluster", "dgx-h1000"],
        "dgx-h1000 is not a known cluster",
        "'dgx-h100'",
    ),
    "unknown stack": (["simulate", *SMALL, "--stack", "pipr"], "pipr is not a known stack", "'piper'"),
    "unknown key": (["simulate", *SMALL, "--strategy", "ppp=2"], "ppp = 2 is not a key", "'pp'"),
    "no key": (["simulate", *SMALL, "--strategy", "fast"], "fast is not key=value", "pp=4"),
    "unknown schedule": (
        ["simulate", *SMALL, "--strategy", "pp=2,schedule=1f1bb"],
        "schedule = 1f1bb",
        "'1f1b'",
    ),
    "key twice": (["simulate", *SMALL, "--strategy", "pp=2,pp=4"], "pp = 2 and 4 is given twice", "keep one"),
    "text for a degree": (
        ["simulate", *SMALL, "--strategy", "pp=two"],
        "pp = two must be a whole number >= 1",
        "pp=1",
    ),
    "zero degree": (["simulate", *SMALL, "--strategy", "dp=0"], "dp = 0 must be a whole number >= 1", "dp=1"),
    "negative degree": (
        ["simulate", *SMALL, "--strategy", "dp=-2"],
        "dp = -2 must be a whole number >= 1",
        "dp=1",
    ),
    "NaN for a degree": (
        ["simulate", *SMALL, "--strategy", "dp=nan"],
        "dp = nan must be a whole number >= 1",
        "dp=1",
    ),
    "more stages than layers + 2": (["simulate", *SMALL, "--strategy", "pp=19"], "19", "18"),
    "a batch that dp does not divide": (
        ["simulate", *SMALL, "--strategy", "dp=4", "--global-batch", "10"],
        "10",
        "8 or 12",
    ),
    "a strategy for another number of GPUs": (
        ["simulate", *SMALL, "--gpus", "6", "--strategy", "pp=2,dp=2"],
        "6",
        "4",
    ),
    "microbatch given twice": (
        ["simulate", *SMALL, "--micro-batch", "2", "--strategy", "micro_batch=1"],
        "micro_batch = 2 contradicts micro_batch = 1 in --strategy",
        "give it once",
    ),
    "missing strategy file": (
        ["simulate", *SMALL, "--strategy", "nowhere.json"],
        "nowhere.json does not exist",
        "path",
    ),
}


@pytest.mark.parametrize("name", USAGE)
def test_a_command_line_that_cannot_be_read_is_explained(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message, fix = USAGE[name]
    err = refused(arguments, capsys)
    head, _, advice = err.partition("\nfix: ")
    assert message in head
    assert fix in advice


@pytest.mark.parametrize("name", JOBS)
def test_a_job_that_cannot_be_built_is_explained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message, fix = JOBS[name]
    err = refused(arguments, capsys)
    head, _, advice = err.partition("\nfix: ")
    assert message in head
    assert fix in advice


@pytest.mark.parametrize("name", ["strategy.json", "config.json"])
def test_broken_json_is_shown_with_line_and_column(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    file.write_text('[\n  {"op": "mesh"\n')
    target = [str(file)] if name == "config.json" else [*SMALL, "--strategy", str(file)]
    err = refused(["simulate", *target], capsys)
    assert f"{file}:3:1" in err


def test_more_gpus_than_a_cluster_has_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "two_nodes.yaml"
    cluster.write_text("schema_version: 1\nextends: dgx-h100\nname: two_nodes\nmax_nodes: 2\n")
    err = refused(["simulate", *SMALL, "--cluster", str(cluster), "--strategy", "dp=17"], capsys)
    assert "gpus = 17 is more than the 16 that two_nodes has" in err
    assert "fix: use at most 16" in err


@pytest.mark.parametrize("option", ["--seq-len", "--gpus", "--strategy"])
def test_a_compiled_plan_cannot_be_changed(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json.gz"
    assert main(["simulate", *SMALL, "--strategy", "pp=2", "--plan-out", str(plan), "--json"]) == 0
    capsys.readouterr()
    err = refused(["simulate", str(plan), option, "2" if option != "--strategy" else "pp=2"], capsys)
    assert f"{option} = " in err
    assert "which is compiled already" in err


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    err = refused(["simulate", *SMALL, "--trace", str(tmp_path / "file" / "trace.json")], capsys)
    assert "--trace = " in err
    assert "cannot be written" in err


def test_with_json_the_error_is_also_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "tiny-llama", "--gpus", "-3", "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "error": {
            "code": "bad_input",
            "where": "command line",
            "field": "--gpus",
            "value": "-3",
            "rule": "must be a whole number >= 1",
            "fix": "write a whole number such as 64",
        }
    }
    assert err.startswith("error: command line: --gpus = -3 must be a whole number >= 1\nfix: ")

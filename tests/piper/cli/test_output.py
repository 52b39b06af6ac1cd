"""Where output goes: paths are judged before the work; streams may be closed, full, of another encoding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from piper.cli import main

ROOT = Path(__file__).resolve().parents[3]
SMALL = ["tiny-llama", "--seq-len", "32", "--strategy", "pp=2,dp=2"]


def shell(arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `piper ARGUMENTS` in a shell, redirections included."""
    command = f"{sys.executable} -m piper {arguments}"
    return subprocess.run(
        ["sh", "-c", command],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail when anything is simulated."""

    def predict(*_: object, **__: object) -> None:
        raise AssertionError("the work began before the output was judged")

    monkeypatch.setattr("piper.predict.predict", predict)
    monkeypatch.setattr("piper.search.search_strategies", predict)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("option", ["--out", "--trace", "--plot", "--memory-plot", "--plan-out"])
@pytest.mark.parametrize("path", ["", "{file}/x.png", "nul\0.png"])
def test_a_path_that_cannot_be_written_is_refused_before_the_work(
    option: str, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["simulate", *SMALL, option, path.format(file=tmp_path / "file")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{option} = " in err
    assert "fix: " in err


@pytest.mark.usefixtures("no_work")
def test_a_search_asks_for_its_folder_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["search", "tiny-llama", "--out", str(tmp_path / "file")]) == 2
    assert "--out = " in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--plot", "--memory-plot"])
def test_another_picture_format_is_refused_and_leaves_no_file(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "plot.bmp"
    assert main(["simulate", *SMALL, option, str(picture)]) == 2
    err = capsys.readouterr().err
    assert f"{option} = {picture} must end in .png or .svg" in err
    assert "fix: write plot.png" in err
    assert not picture.exists()


def test_a_job_that_fails_leaves_no_empty_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"--trace": "t.json", "--plot": "t.png", "--plan-out": "p.json"}
    options = [word for option, name in files.items() for word in (option, str(tmp_path / name))]
    assert main(["simulate", "tiny-llama", "--strategy", "pp=19", *options]) == 2
    assert "pp x vp" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_with_stdout_closed_the_files_are_written_all_the_same(tmp_path: Path) -> None:
    done = shell(f"simulate tiny-llama --seq-len 32 --out {tmp_path}/kept >&-")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "kept" / "result.json").read_text())["model"] == "tiny-llama"


@pytest.mark.parametrize("arguments", ["models --json", "models", "models nope --json"])
def test_a_full_disk_behind_stdout_is_told_without_a_traceback(arguments: str) -> None:
    done = shell(f"{arguments} >/dev/full")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_an_encoding_without_our_signs_gets_others_and_json_needs_none() -> None:
    job = "llama3-8b --gpus 2 --seq-len 64 --strategy pp=2"
    assert "???" in shell(f"simulate {job}", PYTHONIOENCODING="latin-1").stdout
    done = shell("simulate größer --json", PYTHONIOENCODING="ascii")
    assert done.stdout.isascii()
    assert json.loads(done.stdout)["error"]["code"] == "bad_input"


def test_an_edited_plan_that_loses_work_has_no_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    assert main(["simulate", *SMALL, "--plan-out", str(file)]) == 0
    plan = json.loads(file.read_text())
    tasks = plan["device_plans"][0]["tasks"]
    second = next(
        i
        for i, (kind, mb) in enumerate(zip(tasks["kind"], tasks["microbatch"], strict=True))
        if kind == 0 and mb == 1
    )
    tasks["microbatch"][second] = 0
    file.write_text(json.dumps(plan))
    capsys.readouterr()
    assert main(["simulate", str(file), "--json"]) == 4
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "illegal_plan"
    assert any("microbatch 1" in violation for violation in error["violations"])


def test_a_compressed_plan_is_known_by_its_first_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json.gz"
    assert main(["simulate", *SMALL, "--plan-out", str(file)]) == 0
    renamed = file.rename(tmp_path / "plan")
    capsys.readouterr()
    assert main(["check", str(renamed), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["legal"] is True


def sparse_config(folder: Path) -> Path:
    """Write a config that leaves much out, and has something that is not planned."""
    file = folder / "config.json"
    keys = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 2_000_000}
    told = {"model_type": "gemma3_text", "pretraining_secret": 7}
    file.write_text(json.dumps({"architectures": ["Gemma3ForCausalLM"], **keys, **told}))
    return file


def test_numbers_and_lists_of_one_model_can_be_read(tmp_path: Path) -> None:
    file = sparse_config(tmp_path)
    text = shell(f"models {file}").stdout
    assert "\nvocabulary: 2,000,000\n" in text
    assert "\nassumed\n  " in text
    assert max(len(line) for line in text.splitlines() if str(file) not in line) < 120
    assert json.loads(shell(f"models {file} --json").stdout)["vocabulary"] == 2_000_000


def test_what_all_strategies_are_warned_of_is_told_once(tmp_path: Path) -> None:
    job = "--gpus 4 --seq-len 32 --strategy pp=2,tp=2,zero=1 --strategy pp=4"
    text = shell(f"compare {sparse_config(tmp_path)} {job}").stdout
    assert text.count("pretraining_secret") == 1
    assert "\nwarning: config keys that the planned model does not follow" in text
    assert "\npp=2,tp=2,zero=1: warning: zero=1" in text

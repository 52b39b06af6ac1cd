"""The user's factories, modules and schedules inside a command."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from piper.cli import main
from piper.user_code import LeftError, user_code

MODULE = """
import sys
from torch import nn
import piper

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
    def forward(self, tokens, labels):
        leave()
        print("forward runs")
        with piper.annotate("PP"):
            hidden = self.embedding(tokens)
        with piper.annotate("PP"):
            logits = self.head(hidden).float().flatten(0, 1)
            return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")

def leave():
    pass
def talks():
    print("factory runs")
    return Model()
def leaves():
    sys.exit(0)
def leaves_in_forward():
    global leave
    leave = lambda: sys.exit(7)
    return Model()
"""

SCHEDULE = """
import sys
def leaves(**counts):
    sys.exit(0)
def talks(*, num_pipeline_ranks, num_microbatches, **rest):
    print("schedule runs")
    ranks, order = range(num_pipeline_ranks), [(k, m) for k in "FB" for m in range(num_microbatches)]
    return [[f"{rank}{kind}{microbatch}" for kind, microbatch in order] for rank in ranks]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "users_model.py").write_text('print("module is imported")\n' + MODULE)
    (tmp_path / "users_exit.py").write_text("raise SystemExit(9)\n")
    (tmp_path / "users_schedule.py").write_text('print("file is loaded")\n' + SCHEDULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("users_model", "users_exit"):
        sys.modules.pop(name, None)


def test_leaving_becomes_an_ordinary_exception() -> None:
    with pytest.raises(LeftError, match=r"it calls sys\.exit\(3\)"), user_code():
        sys.exit(3)


def test_what_users_code_prints_goes_to_stderr(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strategy = f"pp=2,dp=1,schedule={folder}/users_schedule.py:talks"
    job = ["--seq-len", "8", "--global-batch", "2", "--strategy", strategy, "--json"]
    assert main(["simulate", "users_model:talks", *job]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["model"] == "users_model:talks"
    for text in ("module is imported", "factory runs", "forward runs", "file is loaded", "schedule runs"):
        assert text in err


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["simulate", "users_exit:any", "--seq-len", "8"], "module"),
        (["simulate", "users_model:leaves", "--seq-len", "8"], "factory"),
        (["simulate", "users_model:leaves_in_forward", "--seq-len", "8"], "forward"),
        (["schedules", "users_schedule.py:leaves", "--pp", "2", "--microbatches", "2"], "schedule"),
        (["schedules", "users_exit.py:any", "--pp", "2", "--microbatches", "2"], "schedule"),
    ],
)
def test_code_that_calls_exit_is_named_and_decides_no_exit_code(
    folder: Path, arguments: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["field"] == field
    assert "sys.exit(" in error["rule"] + error["value"]
    assert error["fix"]


def test_a_module_that_is_no_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "__main__:nothing", "--seq-len", "8"]) == 2
    assert "__main__" in capsys.readouterr().err

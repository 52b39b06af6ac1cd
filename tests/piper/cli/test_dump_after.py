"""`piper check --dump-after PASS` shows the graph between any two rewrites."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from piper.cli import main
from piper.passes import PASSES

JOB = ["tiny-llama", "--gpus", "2", "--strategy", "pp=2,recompute=full", "--seq-len", "64"]


def test_the_graph_is_printed_before_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *JOB, "--dump-after", "insert_transfers"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "stages: 2, microbatches: 4"
    assert any(line.startswith("SEND_F.e0 ") for line in others)
    assert others[-1].startswith("legal: ")


@pytest.mark.parametrize("name", [*PASSES, "place", "split"])
def test_every_pass_and_directive_can_be_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *JOB, "--dump-after", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["graph"].startswith("stages: 2")


def test_an_unknown_pass_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *JOB, "--dump-after", "insert_transfer"]) == 2
    err = capsys.readouterr().err
    assert "--dump-after = insert_transfer is not a pass" in err
    assert "did you mean 'insert_transfers'" in err


def test_a_plan_file_has_no_graph_any_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main(["simulate", *JOB, "--plan-out", str(path)]) == 0
    assert main(["check", str(path), "--dump-after", "split"]) == 2
    assert "is compiled already" in capsys.readouterr().err

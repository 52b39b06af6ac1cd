"""The runs of the language guide do what it says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from piper.cli import main

ROOT = Path(__file__).resolve().parents[3]
GUIDE = (ROOT / "docs" / "language.md").read_text(encoding="utf-8")
RUNS = re.findall(r"^\$ piper (run .*)$", GUIDE, flags=re.MULTILINE)


def test_the_guide_runs_its_examples_with_experts_and_with_cut_parameters() -> None:
    files = {Path(shlex.split(run)[5]).stem for run in RUNS}
    assert files == {"moe_ep_folded", "dualpipe_v_ep", "fsdp"}


@pytest.mark.parametrize("command", RUNS)
def test_a_run_of_the_guide_is_verified(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main([*shlex.split(command), "--steps", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verified"] is True

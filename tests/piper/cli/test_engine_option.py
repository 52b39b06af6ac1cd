"""`piper simulate --engine`: the answer does not depend on it, and a missing package is no failure."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from piper.cli import main

JOB = ["simulate", "tiny-llama", "--seq-len", "32", "--gpus", "4", "--global-batch", "8",
       "--strategy", "pp=2,dp=2,zero=1"]  # fmt: skip


def result(engine: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([*JOB, "--engine", engine, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    del found["timings_s"]
    return found


def test_every_engine_prints_the_same_result(capsys: pytest.CaptureFixture[str]) -> None:
    expected = result("reference", capsys)
    assert result("fast", capsys) == expected
    assert result("auto", capsys) == expected


def test_without_numba_the_result_is_that_of_the_reference_with_a_notice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = result("reference", capsys)
    monkeypatch.setitem(sys.modules, "numba", None)
    found = result("fast", capsys)
    (notice,) = set(found.pop("warnings")) - set(expected.pop("warnings"))
    assert "the fast engine needs numba" in notice
    assert found == expected
    assert main([*JOB, "--engine", "fast"]) == 0
    assert "the reference engine gives the same answer" in capsys.readouterr().out

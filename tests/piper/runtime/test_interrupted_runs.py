"""Ctrl-C ends a run after the step under way and keeps what was trained; pressed again, at once."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from piper.cli import main
from piper.runtime import rank as ranks
from piper.runtime.handlers import compute
from piper.runtime.progress import ProgressBoard

pytestmark = pytest.mark.timeout(60)

STEPS = 1000
RUN = [
    "run", "tiny-llama", "--local", "2", "--strategy", "pp=2", "--seq-len", "16", "--global-batch", "2",
    "--steps", str(STEPS), "--json",
]  # fmt: skip
SOON_S = 10.0


@pytest.fixture(autouse=True)
def interrupted_by_signals() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    yield
    signal.signal(signal.SIGINT, before)
    assert multiprocessing.active_children() == []


def press() -> None:
    os.kill(os.getppid(), signal.SIGINT)


def press_twice() -> None:
    press()
    time.sleep(0.5)
    press()
    time.sleep(SOON_S)


def in_the_third_step(monkeypatch: pytest.MonkeyPatch, deed: Callable[[], None]) -> None:
    original = compute.forward

    def forward(context: Any, step: Any, task: Any) -> None:
        if (context.rank, step.number, task.microbatch) == (0, 2, 0):
            deed()
        original(context, step, task)

    monkeypatch.setattr(compute, "forward", forward)


@pytest.mark.parametrize("options", [[], ["--verify"]])
def test_an_interrupted_run_keeps_its_steps_and_exits_with_130(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    in_the_third_step(monkeypatch, press)
    assert main([*RUN, "--out", str(tmp_path), *options]) == 130
    out, err = capsys.readouterr()
    assert err == "interrupted\n"
    found = json.loads(out)
    assert found["interrupted"] is True
    assert 3 <= len(found["steps"]) < STEPS
    assert found["verified"] is (True if options else None)
    assert all(step["loss"] > 0 and step["step_time_s"] > 0 for step in found["steps"])
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == found["steps"]


def ends_soon_with_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    assert main(RUN) == 130
    assert time.monotonic() - begin < SOON_S
    assert capsys.readouterr() == ("", "interrupted\n")


def test_a_second_interruption_ends_a_run_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_the_third_step(monkeypatch, press_twice)
    ends_soon_with_nothing(capsys)


def test_before_the_first_step_there_is_nothing_to_keep(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def agree(*_: object, **__: object) -> None:
        press()
        time.sleep(SOON_S)

    monkeypatch.setattr(ranks, "require_agreement", agree)
    ends_soon_with_nothing(capsys)


def test_all_ranks_end_after_the_furthest_step_that_one_has_begun() -> None:
    board = ProgressBoard(2)
    assert board.begins(0, 3)
    assert board.begins(1, 4)
    board.close()
    assert board.name_last_step()
    assert board.begins(0, 4)
    assert not board.begins(0, 5)
    assert not board.begins(1, 5)

"""`piper export`: from a result folder, a model or a plan to the files of other tools."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from piper.cli import main
from piper.interop import EXPORTS, LATER

SMALL = ["tiny-llama", "--seq-len", "32", "--strategy", "pp=2,dp=2"]


def said(arguments: list[str], capsys: pytest.CaptureFixture[str], *, code: int = 0) -> str:
    assert main(arguments) == code, capsys.readouterr().err
    out, err = capsys.readouterr()
    return err if code else out


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    said(["simulate", *SMALL, "--out", str(tmp_path / "out"), "--plan-out", str(tmp_path / "plan")], capsys)
    return tmp_path / "out"


def snapshot_of(source: list[str], path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    said(["export", "memory-snapshot", *source, "-o", str(path)], capsys)
    found: dict[str, Any] = pickle.loads(path.read_bytes())
    return found


def test_a_result_a_model_and_a_plan_give_the_same_snapshot(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = [[str(folder)], [str(folder / "result.json")], SMALL, [str(tmp_path / "plan")]]
    found = [snapshot_of(source, tmp_path / "memory.pickle", capsys) for source in sources]
    assert found[0]["segments"]
    assert all(other == found[0] for other in found[1:])


def test_the_fullest_rank_is_taken_unless_one_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = json.loads((folder / "result.json").read_text())["ranks"]
    peaks = {row["pipeline_rank"]: row["peak_memory_bytes"] for row in ranks}
    fullest = max(peaks, key=lambda rank: peaks[rank])
    target = ["-o", str(tmp_path / "memory.pickle"), "--json"]
    found = json.loads(said(["export", "memory-snapshot", str(folder), *target], capsys))
    assert f"(pipeline rank {fullest})" in found["note"]
    for rank, home in ((0, 0), (1, 0), (3, 1)):
        out = said(["export", "memory-snapshot", str(folder), *target, "--rank", str(rank)], capsys)
        assert json.loads(out)["note"].startswith(f"rank {rank} (pipeline rank {home}): ")


def test_a_trace_is_that_of_simulate_and_can_be_of_one_rank(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(["simulate", *SMALL, "--trace", str(tmp_path / "expected.json")], capsys)
    said(["export", "chrome", str(folder), "-o", str(tmp_path / "trace.json")], capsys)
    expected = json.loads((tmp_path / "expected.json").read_text())
    assert json.loads((tmp_path / "trace.json").read_text()) == expected
    again = ["export", "chrome", str(tmp_path / "trace.json"), "--rank", "2"]
    said([*again, "-o", str(tmp_path / "one.json")], capsys)
    events = json.loads((tmp_path / "one.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {2}


def test_a_trained_job_can_be_exported_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(["run", *SMALL, "--local", "4", "--steps", "2", "--out", str(tmp_path / "run")], capsys)
    found = snapshot_of([str(tmp_path / "run"), "--rank", "3"], tmp_path / "memory.pickle", capsys)
    assert {frame["name"] for event in found["device_traces"][0] for frame in event["frames"]} >= {"1F0"}


def test_kinds_that_are_not_there_are_told_from_those_that_nobody_knows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for kind in LATER:
        err = said(["export", kind, "tiny-llama", "-o", "x"], capsys, code=2)
        assert f"KIND = {kind} is not available in this version\nfix: available: memory-snapshot, " in err
    err = said(["export", "memory-snapshto", "tiny-llama", "-o", "x"], capsys, code=2)
    assert "is not known\nfix: did you mean 'memory-snapshot'?" in err


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        ("{out}", ["--rank", "4"], "--rank = 4 is not one of the 4 ranks of the job\nfix: give 0 to 3"),
        ("{out}", ["--gpus", "8"], "--gpus = 8 cannot change {out}, which is simulated already"),
        ("{out}", ["--set", "model.attention=math"], "--set = "),
        ("{bare}", [], "RESULT = {bare} has no plan.json.gz, which says what took memory\nfix: simulate"),
        ("nowhere", [], "MODEL = nowhere is not a catalogue name"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_the_way_out(
    source: str,
    options: list[str],
    says: str,
    *,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("result.json", "timeline.npz"):
        (bare / name).write_bytes((folder / name).read_bytes())
    places = {"out": str(folder), "bare": str(bare)}
    arguments = ["export", "memory-snapshot", source.format(**places), *options, "-o", str(tmp_path / "x")]
    err = said(arguments, capsys, code=2)
    assert says.format(**places) in err
    assert not (tmp_path / "x").exists()


def test_a_result_without_a_plan_does_not_keep_that_of_another(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dataclasses import replace

    from piper.report.result import load_result, plan_file_of_result

    assert plan_file_of_result(folder) is not None
    replace(load_result(folder), plan=None).save(folder)
    assert plan_file_of_result(folder) is None


def test_every_line_of_the_table_has_a_function_and_no_name_stands_in_both() -> None:
    assert all(callable(export.writer()) for export in EXPORTS.values())
    assert set(EXPORTS).isdisjoint(LATER)

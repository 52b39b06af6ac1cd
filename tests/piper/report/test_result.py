"""Results on disk: what is written reads back; what is not a result is refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from piper.errors import JobError
from piper.report.result import load_result
from simulator.timeline.chrome import write_chrome_trace
from tests.piper.report.samples import gpipe_timeline, sample_result


@pytest.mark.parametrize("entry", ["", "result.json"])
def test_a_saved_result_reads_back(entry: str, tmp_path: Path) -> None:
    folder = sample_result().save(tmp_path / "deep" / "best")
    found = load_result(folder / entry)
    assert found.name == "best"
    assert found.summary == sample_result().summary
    assert found.timeline.rows() == gpipe_timeline().rows()
    assert found.step_time_s == 0.014


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_reads_back_to_its_timeline(name: str, tmp_path: Path) -> None:
    timeline = gpipe_timeline()
    found = load_result(write_chrome_trace(timeline, tmp_path / name))
    assert found.name == name
    assert found.timeline.rows() == timeline.rows()
    assert found.timeline.step_end_ns.tolist() == timeline.step_end_ns.tolist()
    assert found.step_time_s == timeline.step_time_ns / 1e9
    for before, after in zip(timeline.tracks, found.timeline.tracks, strict=True):
        assert (after.n_devices, after.stages, after.streams) == (
            before.n_devices,
            before.stages,
            before.streams,
        )
        assert after.kinds.tolist() == before.kinds.tolist()
        assert after.memory_bytes.tolist() == before.memory_bytes.tolist()


def test_a_result_shows_itself_as_text_and_as_a_frame() -> None:
    result = sample_result()
    assert str(result).startswith("tiny-llama, 8.03 B parameters")
    assert "<pre>tiny-llama" in result._repr_html_()
    assert len(result.to_frame()) == len(result.timeline.rows())


REFUSED = {
    "missing": (None, "does not exist"),
    "broken": ('{"step_time_s": ?}', "is not valid JSON: Expecting value"),
    "a list": ("[1]", "neither a result nor a trace"),
    "something else": ('{"a": 1}', "neither a result nor a trace"),
    "a foreign trace": (
        '{"traceEvents": [{"ph": "X", "pid": 1, "name": "x", "ts": 1}]}',
        "that Piper does not write",
    ),
    "a trace without processes": (
        '{"traceEvents": [{"ph": "X"}]}',
        "lacks what Piper writes (KeyError: 'pid')",
    ),
    "an empty trace": ('{"traceEvents": [], "otherData": {"source": "simulated"}}', "has no events"),
    "a trace of others": (
        json.dumps(
            {
                "traceEvents": [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "python"}}],
                "otherData": {"source": "x"},
            }
        ),
        "'python' that Piper does not write",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_result_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    content, rule = REFUSED[case]
    file = tmp_path / "result.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(JobError) as caught:
        load_result(file)
    assert caught.value.value == str(file)
    assert rule in caught.value.rule
    assert "--out" in caught.value.fix or "--trace" in caught.value.fix


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError) as caught:
        sample_result().save(tmp_path / "file" / "out")
    assert caught.value.field == "--out"
    assert "cannot be written" in caught.value.rule


def test_a_result_of_another_version_names_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps({"step_time_s": 1.0, "model": "m"}))
    with pytest.raises(JobError) as caught:
        load_result(tmp_path)
    assert "needed_memory_bytes" in caught.value.rule
    assert "--out" in caught.value.fix

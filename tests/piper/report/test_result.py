"""Results on disk: what is written reads back; what is not a result is refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        ("n_parameters", None, "n_parameters must be a whole number >= 0"),
        ("step_time_s", 0, "step_time_s must be a finite number > 0"),
        ("step_time_s", 1e308, "step_time_s must be a finite number > 0"),
        ("fits", "yes", "fits must be true or false"),
        ("strategy.shorthand", 3, "strategy.shorthand must be a text"),
        ("breakdown_s.compute", "x", "breakdown_s.compute must be a finite number >= 0"),
        ("breakdown_s", [], "breakdown_s must be an object"),
        ("breakdown_s.bubble", 1e20, "breakdown_s does not add up to step_time_s"),
        ("segments_per_stage", 3, "segments_per_stage must be a list"),
        ("ranks", [], "ranks must be a list, and not empty"),
        ("ranks.0.stages.0", -1, "ranks[0].stages[0] must be a whole number >= 0"),
        ("ranks.0.memory_by_class_bytes", {}, "ranks[0].memory_by_class_bytes.parameters is missing"),
        ("warnings", "text", "warnings must be a list"),
        ("error_band.basis", None, "error_band.basis must be a text"),
    ],
)
def test_a_value_of_another_kind_is_named(path: str, value: object, fault: str, tmp_path: Path) -> None:
    file = sample_result().save(tmp_path / "kept") / "result.json"
    content = json.loads(file.read_text())
    *keys, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    inner: Any = content
    for key in keys:
        inner = inner[key]
    inner[last] = value
    file.write_text(json.dumps(content))
    with pytest.raises(JobError) as caught:
        load_result(file)
    assert caught.value.rule == f"is no result: {fault}"
    assert "--out" in caught.value.fix


@pytest.mark.parametrize(
    ("steps", "fault"),
    [
        ([], "steps must be a list, and not empty"),
        (1, "steps must be a list"),
        ([{"loss": "x", "step_time_s": 1.0, "grad_norm": None}], "steps[0].loss must be a finite number"),
        (
            [{"loss": 1.0, "step_time_s": 0, "grad_norm": None}],
            "steps[0].step_time_s must be a finite number",
        ),
    ],
)
def test_a_run_without_its_steps_is_refused(steps: object, fault: str, tmp_path: Path) -> None:
    run = {
        "strategy": "pp=1", "world_size": 1, "device": "cpu", "steps": steps, "tokens_per_s": 1.0,
        "peak_memory_bytes": 1, "verified": None, "max_relative_error": None, "whole_batch_error": None,
        "predicted_step_time_s": None,
    }  # fmt: skip
    file = sample_result().save(tmp_path / "kept") / "result.json"
    file.write_text(json.dumps(run))
    with pytest.raises(JobError) as caught:
        load_result(file)
    assert fault in caught.value.rule
    assert "--out" in caught.value.fix

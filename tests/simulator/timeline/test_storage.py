from __future__ import annotations

import json

import numpy as np
import pytest

from simulator import load_timeline, save_timeline, simulate
from simulator.errors import PlanError
from tests.plans import FakeCostModel, one_f_one_b_rows, pipeline_plan


@pytest.fixture(scope="module")
def timeline():
    return simulate(pipeline_plan(one_f_one_b_rows(3, 4), replicas=2, clip=True), FakeCostModel(launch_ns=3))


def test_a_timeline_comes_back_as_it_was_saved(tmp_path, timeline):
    loaded = load_timeline(save_timeline(timeline, tmp_path / "timeline.npz"))
    assert loaded.rows() == timeline.rows()
    assert (loaded.source, loaded.warnings) == (timeline.source, timeline.warnings)
    assert loaded.step_end_ns.tolist() == timeline.step_end_ns.tolist()
    for found, track in zip(loaded.tracks, timeline.tracks, strict=True):
        for name in track.__slots__:
            value, expected = getattr(found, name), getattr(track, name)
            if isinstance(expected, np.ndarray):
                assert value.dtype == expected.dtype
                assert value.tolist() == expected.tolist()
            else:
                assert value == expected


def test_the_same_timeline_gives_the_same_bytes(tmp_path, timeline):
    first, second = (save_timeline(timeline, tmp_path / name).read_bytes() for name in ("a.npz", "b.npz"))
    assert first == second


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(PlanError, match="does not exist") as caught:
        load_timeline(tmp_path / "none.npz")
    assert caught.value.field == "path"
    assert "--out" in caught.value.fix


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 broken"])
def test_a_broken_file_is_refused(tmp_path, content):
    path = tmp_path / "t.npz"
    path.write_bytes(content)
    with pytest.raises(PlanError, match="is no timeline file") as caught:
        load_timeline(path)
    assert caught.value.value == str(path)


def test_an_archive_of_something_else_is_refused(tmp_path):
    np.savez(tmp_path / "t.npz", other=np.zeros(3))
    with pytest.raises(PlanError, match="is no timeline file"):
        load_timeline(tmp_path / "t.npz")


def test_another_schema_version_is_refused_by_number(tmp_path):
    np.savez(tmp_path / "t.npz", header=np.array(json.dumps({"schema_version": 99})))
    with pytest.raises(PlanError, match="schema version 99, this Piper reads 1") as caught:
        load_timeline(tmp_path / "t.npz")
    assert "simulate again" in caught.value.fix


def test_a_folder_that_is_not_there_cannot_be_written_to(tmp_path, timeline):
    with pytest.raises(PlanError) as caught:
        save_timeline(timeline, tmp_path / "none" / "t.npz")
    assert caught.value.field == "path"
    assert "writable" in caught.value.fix

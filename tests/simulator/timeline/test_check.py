"""A timeline file that was damaged or edited is refused with its first fault, never drawn."""

import json
from dataclasses import replace

import numpy as np
import pytest

from simulator.errors import PlanError
from simulator.timeline.check import timeline_fault
from simulator.timeline.storage import load_timeline, save_timeline
from tests.plans import FakeCostModel, PlanBuilder


@pytest.fixture(scope="module")
def timeline():
    from simulator import simulate

    builder = PlanBuilder()
    for microbatch in range(3):
        builder.devices[0].compute("a", 7, microbatch=microbatch)
    return simulate(builder.build(), FakeCostModel(), steps=2)


def with_column(timeline, **columns):
    return replace(timeline, tracks=(replace(timeline.tracks[0], **columns), *timeline.tracks[1:]))


def test_a_simulated_timeline_has_no_fault(timeline):
    assert timeline_fault(timeline) is None


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("task", lambda column: column + 100, "task has an index"),
        ("stream", lambda column: column + 100, "stream has an index"),
        ("step", lambda column: column + 100, "step has an index"),
        ("kinds", lambda column: column + 100, "kinds has an index"),
        ("kinds", lambda column: column[:-1], "kinds for"),
        ("end_ns", lambda column: column * 0, "end_ns lies before start_ns"),
        ("end_ns", lambda column: column[:-1], "columns of spans differ in length"),
        ("start_ns", lambda column: column - 10**6, "start_ns is no column"),
        ("start_ns", lambda column: column.astype(float), "start_ns is no column"),
        ("start_ns", lambda column: np.array("x"), "start_ns is no column"),
        ("ready_ns", lambda column: column + 2**62, "ready_ns is no column"),
        ("memory_bytes", lambda column: column[:, :3], "memory_bytes is no table"),
        ("memory_bytes", lambda column: column - 10**18, "memory_bytes is no table"),
        ("memory_ns", lambda column: np.array([5, 3]), "memory_bytes is no table of 2 x"),
    ],
)
def test_a_column_that_contradicts_the_others_is_named(timeline, tmp_path, *, name, change, fault):
    broken = with_column(timeline, **{name: change(getattr(timeline.tracks[0], name))})
    assert fault in timeline_fault(broken)
    save_timeline(broken, tmp_path / "timeline.npz")
    with pytest.raises(PlanError) as caught:
        load_timeline(tmp_path / "timeline.npz")
    assert fault in caught.value.rule
    assert "--out" in caught.value.fix


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"tracks": ()}, "no tracks"),
        ({"source": 3}, "source is no text"),
        ({"warnings": (3,)}, "warnings are no texts"),
        ({"step_end_ns": np.array([], dtype=np.int64)}, "step_end_ns is no rising column"),
        ({"step_end_ns": np.array([5, 3])}, "step_end_ns is no rising column"),
    ],
)
def test_facts_of_the_whole_are_checked(timeline, change, fault):
    assert fault in timeline_fault(replace(timeline, **change))


@pytest.mark.parametrize(
    ("name", "value"), [("rank", "x"), ("n_devices", True), ("stages", ("0",)), ("streams", (1,))]
)
def test_facts_of_a_track_have_their_types(timeline, name, value):
    assert timeline_fault(with_column(timeline, **{name: value})).startswith("track 0: ")


def test_bytes_that_were_changed_are_refused_or_harmless(timeline, tmp_path):
    file = save_timeline(timeline, tmp_path / "timeline.npz")
    good = file.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for position in rng.integers(0, len(good), size=200).tolist():
        data = bytearray(good)
        data[position] ^= int(rng.integers(1, 256))
        file.write_bytes(bytes(data))
        try:
            assert timeline_fault(load_timeline(file)) is None
        except PlanError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("header", ["[]", "3", "null", "{", "{}", json.dumps({"schema_version": 9})])
def test_a_header_that_is_none_is_refused(timeline, tmp_path, header):
    file = save_timeline(timeline, tmp_path / "timeline.npz")
    arrays = dict(np.load(file))
    np.savez(file, **(arrays | {"header": np.array(header)}))
    with pytest.raises(PlanError, match="timeline"):
        load_timeline(file)

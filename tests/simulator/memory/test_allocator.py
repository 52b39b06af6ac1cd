"""The allocator against series of requests worked out by hand from its documented rules, and its laws."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import simulate
from simulator.memory import allocator, run_allocator
from simulator.memory.blocks import FIRST_ADDRESS
from simulator.plan import MemoryClass
from tests.plans import FakeCostModel, PlanBuilder

MIB = 1 << 20
LIVES = st.lists(
    st.tuples(st.integers(0, 40 * MIB), st.integers(0, 60), st.integers(0, 20), st.integers(0, 1)),
    min_size=1,
    max_size=40,
)


def served(requests, *, expandable=False, capacity=allocator.UNLIMITED):
    """Serve ("name", bytes[, stream]) as requests and "name" as frees; return offsets and reserved bytes."""
    names = [row[0] for row in requests if not isinstance(row, str)]
    rows = [(*row, 0)[:3] for row in requests if not isinstance(row, str)]
    events = [-1 - names.index(row) if isinstance(row, str) else names.index(row[0]) for row in requests]
    size = allocator.rounded_bytes(np.array([row[1] for row in rows], dtype=np.int64))
    stream = np.array([row[2] for row in rows], dtype=np.int64)
    address, reserved, retries = allocator._serve(
        np.array(events, dtype=np.int64), size, stream, options=(expandable, capacity)
    )
    offsets = dict(zip(names, (address - FIRST_ADDRESS).tolist(), strict=True))
    return offsets, [value / MIB for value in reserved.tolist()], retries


def run_of(lives, **options):
    begin = np.array([row[1] for row in lives], dtype=np.int64)
    end = begin + np.array([row[2] for row in lives], dtype=np.int64)
    events, _ = allocator._in_order(begin, end)
    size = allocator.rounded_bytes(np.array([row[0] for row in lives], dtype=np.int64))
    stream = np.array([row[3] for row in lives], dtype=np.int64)
    chosen = (options.get("expandable", False), options.get("capacity", allocator.UNLIMITED))
    address, reserved, _ = allocator._serve(events, size, stream, options=chosen)
    return events, size, address, reserved


def test_segments_are_2_mib_then_20_mib_then_whole_2_mib_by_the_size_of_the_request():
    assert served([("a", 1), ("b", MIB), ("c", MIB + 1), ("d", 19 * MIB)])[1] == [2, 2, 22, 42]
    assert served([("a", 10 * MIB), ("b", 10 * MIB + 1)])[1] == [10, 22]


def test_a_rest_above_1_mib_is_split_off_and_serves_the_next_request():
    offsets, reserved, _ = served([("a", 19 * MIB), "a", ("b", 18 * MIB), ("c", MIB + 1)])
    assert reserved == [20, 20, 20, 20]
    assert (offsets["b"], offsets["c"]) == (offsets["a"], 18 * MIB)


def test_the_smallest_block_that_fits_is_taken_and_the_lowest_of_equal_ones():
    series = [
        ("a", 12 * MIB),
        ("b", 30 * MIB),
        ("c", 12 * MIB),
        "c",
        "b",
        "a",
        ("x", 12 * MIB),
        ("y", 12 * MIB),
    ]
    offsets, reserved, _ = served(series)
    assert (offsets["x"], offsets["y"]) == (offsets["a"], offsets["c"])
    assert reserved[-1] == 54


def test_free_neighbours_are_joined():
    series = [("a", 6 * MIB), ("b", 6 * MIB), ("c", 6 * MIB), "a", "c", "b", ("x", 20 * MIB)]
    offsets, reserved, _ = served(series)
    assert offsets["x"] == 0
    assert reserved[-1] == 20


def test_a_stream_does_not_use_the_blocks_of_another():
    _, reserved, _ = served([("a", 12 * MIB, 0), "a", ("b", 12 * MIB, 1)])
    assert reserved == [12, 12, 24]


def test_a_full_device_gives_idle_segments_back_before_it_reserves_more():
    series = [("a", 12 * MIB), ("b", 14 * MIB), "a", ("c", 20 * MIB)]
    _, reserved, retries = served(series, capacity=40 * MIB)
    assert (reserved, retries) == ([12, 26, 26, 34], 1)


def test_an_expandable_segment_grows_at_its_end_by_what_is_lacking():
    series = [("a", 12 * MIB), "a", ("b", 30 * MIB)]
    assert served(series)[1] == [12, 12, 42]
    assert served(series, expandable=True)[1] == [20, 20, 40]


@settings(max_examples=60, deadline=None)
@given(lives=LIVES, expandable=st.booleans(), capacity=st.sampled_from([64 * MIB, allocator.UNLIMITED]))
def test_blocks_in_use_never_overlap_and_are_within_what_is_reserved(lives, expandable, capacity):
    events, size, address, reserved = run_of(lives, expandable=expandable, capacity=capacity)
    alive: set[int] = set()
    for event, total in zip(events.tolist(), reserved.tolist(), strict=True):
        if event < 0:
            alive.remove(-1 - event)
        else:
            alive.add(event)
        spans = sorted((int(address[i]), int(address[i] + size[i])) for i in alive if size[i])
        assert all(left[1] <= right[0] for left, right in pairwise(spans))
        assert sum(end - start for start, end in spans) <= total


@pytest.mark.parametrize("expandable", [False, True])
def test_compiled_and_interpreted_give_the_same_addresses(expandable, monkeypatch):
    numbers = np.random.default_rng(7)
    lives = list(
        zip(*(numbers.integers(0, top, 400).tolist() for top in (30 * MIB, 900, 60, 2)), strict=True)
    )
    found = []
    for many in (0, 1 << 40):
        monkeypatch.setattr(allocator, "MANY_EVENTS", many)
        monkeypatch.delitem(allocator.sys.modules, "simulator.engines.fast.kernel", raising=False)
        found.append(run_of(lives, expandable=expandable, capacity=300 * MIB))
    for compiled, interpreted in zip(*found, strict=True):
        assert compiled.tolist() == interpreted.tolist()


def test_every_step_returns_to_the_static_blocks_and_uses_the_same_segments():
    builder = PlanBuilder()
    device = builder.devices[0]
    device.buffer("weights", 30 * MIB, MemoryClass.PARAMETERS, persistent=True)
    device.buffer("kept", 12 * MIB)
    device.compute("f", 10, microbatch=0, allocates=["kept"], frees=["kept"])
    plan = builder.build()
    (track,) = simulate(plan, FakeCostModel(), steps=3).tracks
    start, end = track.start_ns.reshape(3, -1), track.end_ns.reshape(3, -1)
    run = run_allocator(plan.device_plans[0], start_ns=start, end_ns=end)
    assert (run.allocated_bytes // MIB).tolist() == [30, 42, 30, 42, 30, 42, 30]
    assert (run.reserved_bytes // MIB).tolist() == [30, 42, 42, 42, 42, 42, 42]
    assert run.buffer[run.task < 0].tolist() == [0]

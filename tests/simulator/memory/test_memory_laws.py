"""Laws of the ledger, the allocator and the snapshot, tried on random plans and random requests.

That growing segments reserve no more than fixed ones is *not* a law: they grow in steps of 20 MiB, so one
request of 12 MiB reserves 20 MiB instead of 12, and a better fit for one request can be a worse one for the
next. What holds is that last-in-first-out requests of one stream leave no gap in a segment that grows.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import simulate
from simulator.memory import memory_curve, owners_at, peak_of, rounded_bytes, run_allocator
from simulator.memory.blocks import LARGE_SEGMENT_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES
from simulator.memory.snapshot import NS_PER_US, memory_snapshot
from simulator.plan import MemoryClass
from tests.plans import FakeCostModel, exact_price
from tests.random_plans import PRICES, plans
from tests.simulator.memory.test_allocator import MIB, served
from tests.strategies import compile_drawn, drawn

LAWS = settings(max_examples=30, deadline=None)
SCALE = 700_001
"""Random plans have buffers of 0 to 9 bytes; times this they fill small and large segments."""


def scaled(plan, factor):
    def larger(device):
        return replace(device, buffers=replace(device.buffers, size_bytes=device.buffers.size_bytes * factor))

    return replace(plan, device_plans=tuple(map(larger, plan.device_plans)))


class Run:
    """A plan and what it did; `devices` gives (device plan, track, times as [steps, tasks])."""

    def __init__(self, plan, prices=None, steps=2):
        self.plan, self.steps = plan, steps
        self.timeline = simulate(plan, prices or FakeCostModel(), steps=steps)
        self.devices = [
            (
                device,
                track,
                {name: getattr(track, name).reshape(steps, -1) for name in ("start_ns", "end_ns")},
            )
            for device, track in zip(plan.device_plans, self.timeline.tracks, strict=True)
        ]


class EveryOperation(FakeCostModel):
    """Some nanoseconds for any operation."""

    def operation(self, operation):
        return exact_price(100 + operation.bytes % 97)


RUNS = st.builds(lambda plan, *more: Run(scaled(plan, SCALE), *more), plans(), PRICES, st.integers(1, 3))


def living_bytes(device, times, *, now_ns):
    """Add up, one by one, the buffers that live at `now_ns`, by class."""
    found = [0] * len(MemoryClass)
    table = device.buffers
    alive = defaultdict(int, dict.fromkeys(np.flatnonzero(table.persistent).tolist(), 1))
    for lists, when, sign in ((device.tasks.allocates, "start_ns", 1), (device.tasks.frees, "end_ns", -1)):
        for task, buffers in enumerate(lists.to_rows()):
            for buffer in buffers:
                alive[buffer] += sign * int((times[when][:, task] <= now_ns).sum())
    for buffer, count in alive.items():
        found[table.memory_class[buffer]] += count * int(table.size_bytes[buffer])
    return found


@LAWS
@given(run=RUNS)
def test_at_every_instant_the_classes_add_up_the_buffers_that_live(run):
    for device, track, times in run.devices:
        for now_ns, by_class in zip(track.memory_ns.tolist(), track.memory_bytes.tolist(), strict=True):
            assert by_class == living_bytes(device, times, now_ns=now_ns)


@LAWS
@given(run=RUNS)
def test_memory_is_never_below_the_static_bytes_and_returns_to_them(run):
    for device, track, _ in run.devices:
        totals = track.memory_bytes.sum(axis=1)
        assert (totals >= device.buffers.static_bytes).all()
        assert totals[-1] == device.buffers.static_bytes


@LAWS
@given(run=RUNS)
def test_the_owners_of_the_peak_add_up_to_it(run):
    for device, track, _ in run.devices:
        peak = peak_of(track)
        owners = owners_at(device, track, time_ns=peak.time_ns)
        assert sum(size for _, size in owners) == peak.total_bytes == sum(peak.class_bytes)


@LAWS
@given(run=RUNS, expandable=st.booleans())
def test_what_is_reserved_holds_what_is_allocated_and_is_never_given_back_without_need(run, expandable):
    for device, _, times in run.devices:
        served_bytes = run_allocator(device, **times, expandable_segments=expandable)
        assert (served_bytes.allocated_bytes <= served_bytes.reserved_bytes).all()
        assert (np.diff(served_bytes.reserved_bytes) >= 0).all()
        assert served_bytes.retries == 0
        assert served_bytes.allocated_bytes[-1:].sum() == sum(
            rounded_bytes(device.buffers.size_bytes[device.buffers.persistent])
        )


@LAWS
@given(run=RUNS, expandable=st.booleans())
def test_a_capacity_that_is_just_enough_changes_nothing(run, expandable):
    for device, _, times in run.devices:
        roomy = run_allocator(device, **times, expandable_segments=expandable)
        capacity = roomy.reserved_peak_bytes
        tight = run_allocator(device, **times, expandable_segments=expandable, capacity_bytes=capacity)
        assert tight.retries == 0
        assert tight.reserved_bytes.tolist() == roomy.reserved_bytes.tolist()


@settings(max_examples=15, deadline=None)
@given(run=RUNS, expandable=st.booleans())
def test_the_snapshot_adds_up_to_the_curve_and_its_segments_to_what_is_reserved(run, expandable):
    snapshot = memory_snapshot(run.plan, run.timeline, expandable_segments=expandable)
    sign = {"alloc": 1, "free_completed": -1}
    for number, (device, _, times) in enumerate(run.devices):
        curve = memory_curve(device, **times, sizes=rounded_bytes(device.buffers.size_bytes))
        trace = snapshot["device_traces"][number]
        changes = [(event["time_us"], sign.get(event["action"], 0) * event["size"]) for event in trace]
        totals = curve.class_bytes.sum(axis=1)
        for last in np.flatnonzero(np.diff(curve.time_ns // NS_PER_US, append=-1)).tolist():
            until_us = int(curve.time_ns[last]) // NS_PER_US
            assert sum(size for time_us, size in changes if time_us <= until_us) == totals[last]
        segments = [segment for segment in snapshot["segments"] if segment["device"] == number]
        reserved = run_allocator(device, **times, expandable_segments=expandable).reserved_peak_bytes
        assert sum(segment["total_size"] for segment in segments) == reserved
        assert sum(segment["allocated_size"] for segment in segments) == totals[-1]
        for segment in segments:
            assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
            ends = np.cumsum([block["size"] for block in segment["blocks"]]) + segment["address"]
            assert [block["address"] for block in segment["blocks"][1:]] == ends[:-1].tolist()


@pytest.mark.parametrize("seed", range(12))
def test_so_it_is_for_compiled_strategies(seed):
    run = Run(compile_drawn(drawn(seed)), EveryOperation())
    for device, track, times in run.devices:
        instants = sorted({int(now) for now in track.memory_ns[:: max(1, len(track.memory_ns) // 6)]})
        for now_ns in instants:
            at = np.searchsorted(track.memory_ns, now_ns, side="right") - 1
            assert track.memory_bytes[at].tolist() == living_bytes(device, times, now_ns=now_ns)
        totals = track.memory_bytes.sum(axis=1)
        assert totals.min() == totals[-1] == device.buffers.static_bytes


@LAWS
@given(
    sizes=st.lists(st.integers(1, 40 * MIB), min_size=1, max_size=12),
    depths=st.lists(st.integers(0, 12), min_size=1, max_size=12),
)
def test_requests_last_in_first_out_leave_no_gap_in_a_segment_that_grows(sizes, depths):
    requests, held, peaks = [], [], [0, 0]
    for number, (size, depth) in enumerate(zip(sizes, (depths * 12)[: len(sizes)], strict=True)):
        while len(held) > depth:
            requests.append(held.pop()[0])
        held.append((f"r{number}", int(rounded_bytes(np.array([size]))[0])))
        requests.append((f"r{number}", size))
        for large in (0, 1):
            total = sum(size for _, size in held if (size > SMALL_BYTES) == bool(large))
            peaks[large] = max(peaks[large], total)
    steps = (SMALL_SEGMENT_BYTES, LARGE_SEGMENT_BYTES)
    expected = sum(-(-peak // step) * step for peak, step in zip(peaks, steps, strict=True))
    assert served(requests, expandable=True)[1][-1] * MIB == expected


def test_growing_segments_can_reserve_more_than_fixed_ones_and_less():
    one = [("a", 12 * MIB)]
    assert (served(one)[1][-1], served(one, expandable=True)[1][-1]) == (12, 20)
    larger_each_time = [("a", 20 * MIB), "a", ("b", 40 * MIB), "b", ("c", 60 * MIB)]
    assert served(larger_each_time)[1][-1] == 120
    assert served(larger_each_time, expandable=True)[1][-1] == 60

from __future__ import annotations

import numpy as np
import pytest

from simulator import simulate
from simulator.errors import IllegalPlanError
from simulator.memory import memory_curve, owners_at, peak_of, reserved_peak_bytes, rounded_bytes
from simulator.plan import MemoryClass, TaskKind
from tests.plans import FakeCostModel, PlanBuilder

K = TaskKind
MIB = 1 << 20


def story():
    """One rank: F 0..10 keeps 30 bytes, B 10..20 uses 5 bytes of workspace and frees both at its end."""
    builder = PlanBuilder()
    device = builder.devices[0]
    device.buffer("weights", 100, MemoryClass.PARAMETERS, persistent=True)
    device.buffer("kept", 30)
    device.buffer("scratch", 5, MemoryClass.WORKSPACE)
    device.compute("f", 10, microbatch=0, allocates=["kept"])
    device.compute(
        "b", 10, K.B, microbatch=0, allocates=["scratch"], reads=["kept"], frees=["kept", "scratch"]
    )
    return builder.build()


def test_bytes_rise_at_the_start_and_fall_at_the_end_of_tasks_in_every_step():
    (track,) = simulate(story(), FakeCostModel(), steps=2).tracks
    total = dict(zip(track.memory_ns.tolist(), track.memory_bytes.sum(axis=1).tolist(), strict=True))
    assert total == {0: 130, 10: 135, 20: 130, 30: 135, 40: 100}
    assert track.memory_bytes[1].tolist() == [100, 0, 0, 30, 0, 0, 5]


def test_what_ends_at_an_instant_is_freed_before_what_starts_there_is_allocated():
    builder = PlanBuilder()
    device = builder.devices[0]
    for name in ("a", "b"):
        device.buffer(name, 40)
        device.compute(name, 10, microbatch=0, allocates=[name], frees=[name])
    (track,) = simulate(builder.build(), FakeCostModel(), steps=1).tracks
    assert peak_of(track).total_bytes == 40


def test_the_peak_is_the_first_moment_of_the_most_bytes_and_its_classes_sum_to_it():
    (track,) = simulate(story(), FakeCostModel(), steps=2).tracks
    peak = peak_of(track)
    assert (peak.time_ns, peak.total_bytes) == (10, 135)
    assert peak.by_name() == {
        "parameters": 100, "gradients": 0, "optimizer": 0, "activations": 30, "buckets": 0,
        "communication": 0, "workspace": 5,
    }  # fmt: skip
    assert sum(peak.class_bytes) == peak.total_bytes


def test_the_owners_of_the_peak_are_named_the_largest_first():
    plan = story()
    (track,) = simulate(plan, FakeCostModel(), steps=2).tracks
    (device,) = plan.device_plans
    assert owners_at(device, track, time_ns=10) == [("weights", 100), ("kept", 30), ("scratch", 5)]
    assert owners_at(device, track, time_ns=35) == [("weights", 100), ("kept", 30), ("scratch", 5)]
    assert owners_at(device, track, time_ns=40) == [("weights", 100)]


def test_the_allocator_rounds_to_512_bytes():
    sizes = np.array([0, 1, 512, 513, MIB, MIB + 1, 2 * MIB, 2 * MIB + 1])
    assert rounded_bytes(sizes).tolist() == [0, 512, 512, 1024, MIB, MIB + 512, 2 * MIB, 2 * MIB + 512]


def test_small_buffers_share_a_segment_of_2_mib():
    plan = story()
    (track,) = simulate(plan, FakeCostModel(), steps=1).tracks
    times = {"start_ns": track.start_ns.reshape(1, -1), "end_ns": track.end_ns.reshape(1, -1)}
    assert reserved_peak_bytes(plan.device_plans[0], **times) == 2 * MIB


def test_a_buffer_that_is_freed_before_it_lives_is_an_illegal_plan():
    builder = PlanBuilder()
    device = builder.devices[0]
    device.buffer("ghost", 8)
    device.compute("f", 10, microbatch=0, frees=["ghost"])
    with pytest.raises(IllegalPlanError, match="class activations is freed that is not alive"):
        simulate(builder.build(), FakeCostModel(), steps=1)


def test_a_persistent_buffer_that_a_task_allocates_is_an_illegal_plan():
    builder = PlanBuilder()
    device = builder.devices[0]
    device.buffer("weights", 8, MemoryClass.PARAMETERS, persistent=True)
    device.compute("f", 10, microbatch=0, allocates=["weights"])
    with pytest.raises(IllegalPlanError, match="the persistent buffer 'weights'"):
        simulate(builder.build(), FakeCostModel(), steps=1)


def test_a_device_without_buffers_has_a_flat_curve():
    builder = PlanBuilder()
    builder.devices[0].compute("f", 10, microbatch=0)
    (device,) = builder.build().device_plans
    curve = memory_curve(device, start_ns=np.array([[0]]), end_ns=np.array([[10]]))
    assert curve.time_ns.tolist() == [0]
    assert curve.class_bytes.tolist() == [[0] * 7]

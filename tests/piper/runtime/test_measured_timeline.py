"""A run records the same tasks as a simulation, on one clock."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from piper.cli import main
from piper.runtime import RunOutcome
from piper.runtime.recorder import RankRecord, measured_timeline, step_times_s
from simulator.plan import MemoryClass, Plan, TaskKind
from simulator.timeline.timeline import RankTrack
from tests.piper.runtime.jobs import plan_of, train

STEPS = 3


@cache
def recorded() -> tuple[Plan, RunOutcome]:
    plan = plan_of("pp=2,dp=2,zero=1", clip=1.0, optimizer="adamw")
    return plan, train(plan, steps=STEPS, verify=False)


def test_every_rank_has_a_track_with_the_codes_of_its_plan() -> None:
    plan, outcome = recorded()
    assert outcome.timeline.source == "measured"
    assert [track.rank for track in outcome.timeline.tracks] == [0, 1, 2, 3]
    for track in outcome.timeline.tracks:
        device = plan.device_plans[plan.pipeline_rank_of(track.rank)]
        assert track.codes == device.codes()
        assert track.streams == device.streams
        assert track.task.tolist() == list(range(len(device.tasks))) * STEPS
        assert track.n_devices == 1


def test_the_clock_starts_at_zero_and_steps_end_in_order() -> None:
    _, outcome = recorded()
    timeline = outcome.timeline
    assert min(int(track.dispatch_ns.min()) for track in timeline.tracks) >= 0
    assert timeline.num_steps == STEPS
    assert (np.diff(timeline.step_end_ns) > 0).all()
    assert timeline.makespan_ns == max(int(track.end_ns.max()) for track in timeline.tracks)


def test_a_stream_runs_one_task_at_a_time_in_dispatch_order() -> None:
    for track in recorded()[1].timeline.tracks:
        for stream in range(len(track.streams)):
            mine = track.stream == stream
            assert (track.start_ns[mine][1:] >= track.end_ns[mine][:-1]).all()
        assert (track.end_ns >= track.start_ns).all()
        assert (track.start_ns >= track.dispatch_ns).all()


def test_no_task_starts_before_what_it_waits_for() -> None:
    plan, outcome = recorded()
    for track in outcome.timeline.tracks:
        tasks = plan.device_plans[track.pipeline_rank].tasks
        count = len(tasks)
        for step in range(STEPS):
            for position, waits in enumerate(tasks.waits.to_rows()):
                for wait in waits:
                    at, before = step * count + position, step * count + wait
                    assert track.start_ns[at] >= track.end_ns[before]


def test_step_times_add_up_to_the_run() -> None:
    _, outcome = recorded()
    total_s = sum(step["step_time_s"] for step in outcome.result["steps"])
    assert abs(total_s - outcome.timeline.makespan_ns / 1e9) < 1e-6


def test_the_time_in_which_steps_are_compared_is_left_out() -> None:
    outcome = train(plan_of("pp=2", optimizer="sgd"), steps=STEPS, verify=True)
    timeline = outcome.timeline
    times_s = [step["step_time_s"] for step in outcome.result["steps"]]
    assert np.diff(timeline.step_end_ns, prepend=0) / 1e9 == pytest.approx(times_s, abs=1e-9)
    for track in timeline.tracks:
        assert (np.diff(track.memory_ns) >= 0).all()
        assert track.memory_ns[-1] <= timeline.makespan_ns


def made_up(plan: Plan, rank: int) -> RankRecord:
    """Two steps at 1000 and 50000 ns on rank 0's clock; task i is ready at 100 i and ends at 100 i + 250."""
    begins = np.array([1000, 50_000])
    offset_ns = 7_000_000 * rank
    ready = begins[:, None] + 100 * np.arange(len(plan.device_plans[rank].tasks)) + offset_ns
    times = np.stack([ready, ready, ready, ready + 250], axis=2)
    return RankRecord(
        rank=rank,
        offset_ns=offset_ns,
        times=times,
        step_begin_ns=begins + offset_ns,
        step_end_ns=times[:, :, 3].max(axis=1),
        memory_ns=np.array([0, 1500, 40_000, 50_100]) + offset_ns,
        memory_bytes=np.zeros((4, len(MemoryClass)), dtype=np.int64),
        peak_memory_bytes=0,
    )


def test_ranks_share_one_clock_that_stands_still_between_steps() -> None:
    plan = plan_of("pp=2", global_batch=2)
    records = [made_up(plan, rank) for rank in (0, 1)]
    timeline = measured_timeline(plan, records)
    longest = 100 * max(len(device.tasks) for device in plan.device_plans) + 150
    assert timeline.step_end_ns.tolist() == [longest, 2 * longest]
    assert step_times_s(records) == [longest / 1e9, longest / 1e9]
    for track in timeline.tracks:
        assert track.ready_ns[:2].tolist() == [0, 100]
        assert track.ready_ns[len(track.codes)] == longest
        assert track.memory_ns.tolist() == [0, 500, longest, longest + 100]


def test_a_receive_is_on_the_wire_from_the_start_of_its_send() -> None:
    plan = plan_of("pp=2", global_batch=2)
    timeline = measured_timeline(plan, [made_up(plan, rank) for rank in (0, 1)])
    first, second = timeline.tracks
    for sender, receiver, kind in ((first, second, "F"), (second, first, "B")):
        for microbatch in (0, 1):
            send = sender.codes.index(f"{sender.stages[0]}SEND_{kind}{microbatch}")
            receive = receiver.codes.index(f"{receiver.stages[0]}RECV_{kind}{microbatch}")
            assert receiver.ready_ns[receive] < sender.start_ns[send] < receiver.end_ns[receive]
            assert receiver.start_ns[receive] == sender.start_ns[send]


def test_memory_begins_with_the_static_bytes_and_returns_to_them() -> None:
    plan, outcome = recorded()
    for track in outcome.timeline.tracks:
        bucket = plan.device_plans[track.pipeline_rank].buckets[0]
        for row in (track.memory_bytes[-1], _after_step(track)):
            assert row[MemoryClass.GRADIENTS] == 4 * bucket.padded_numel
            assert row[MemoryClass.PARAMETERS] == 4 * bucket.padded_numel
            assert row[MemoryClass.OPTIMIZER] == 8 * bucket.padded_numel // 2
            assert row[MemoryClass.ACTIVATIONS] == 0
        assert track.memory_bytes[:, MemoryClass.ACTIVATIONS].max() > 0
        assert (np.diff(track.memory_ns) >= 0).all()
    highest = max(int(track.memory_bytes.sum(axis=1).max()) for track in outcome.timeline.tracks)
    assert outcome.result["peak_memory_bytes"] >= highest


def _after_step(track: RankTrack) -> np.ndarray:
    """Return the memory at the end of the first step's last compute task."""
    last = np.flatnonzero((track.step == 0) & (track.kinds[track.task] == TaskKind.UPDATE))[-1]
    return track.memory_bytes[np.searchsorted(track.memory_ns, track.end_ns[last], side="right") - 1]


def test_the_result_has_the_keys_of_the_contract() -> None:
    plan, outcome = recorded()
    result = outcome.result
    assert result["strategy"] == plan.strategy
    assert result["world_size"] == 4
    assert result["device"] == "cpu"
    assert len(result["steps"]) == STEPS
    assert set(result["steps"][0]) == {"loss", "step_time_s", "grad_norm"}
    assert result["tokens_per_s"] > 0
    for key in ("verified", "max_relative_error", "whole_batch_error", "predicted_step_time_s"):
        assert result[key] is None


def test_a_run_that_records_no_tasks_knows_its_steps() -> None:
    plan = plan_of("pp=2,dp=2,zero=1", clip=0.1)
    recorded, bare = (train(plan, verify=False, record=record) for record in (True, False))
    assert [s["loss"] for s in bare.result["steps"]] == [s["loss"] for s in recorded.result["steps"]]
    assert all(step["step_time_s"] > 0 for step in bare.result["steps"])
    assert bare.result["peak_memory_bytes"] == recorded.result["peak_memory_bytes"] > 0
    assert len(bare.timeline.step_end_ns) == len(recorded.timeline.step_end_ns)
    assert [len(track.task) for track in bare.timeline.tracks] == [0] * 4
    assert all(len(track.task) for track in recorded.timeline.tracks)


@pytest.mark.parametrize("option", ["--trace", "--out"])
def test_what_was_not_recorded_cannot_be_written(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--local", "1", "--strategy", "pp=1", "--no-recording", option, str(tmp_path / "x")]
    assert main(["run", "tiny-llama", *given]) == 2
    assert "--no-recording does not measure" in capsys.readouterr().err

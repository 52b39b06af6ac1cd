"""Jobs predicted from fewer microbatches: what comes out is what the whole job gives."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from piper.errors import JobError
from piper.predict import Job, Prediction, compile_job, predict, prepare
from piper.schedules import SCHEDULES, schedule_rows
from piper.schedules.rows import show_rows
from piper.shortened import PERIODS, SAME_KINDS, TOLERANCE, short_counts
from piper.strategy import load_strategy
from piper.workbench import Workbench
from simulator.plan.codec import plan_hash

CODE = re.compile(r"(\d+[A-Z]+)(\d+)")
NOT_EXACT = {"peak_reserved_bytes", "needed_memory_bytes", "warnings", "timings_s"}
NOT_OF_THE_PLAN = {"basis", "owner"}


def both(strategy: str, *, microbatches: int, **job: Any) -> tuple[Prediction, Prediction]:
    """Return a prediction from all microbatches, and one that may leave some out."""
    asked = Job(
        model="tiny-llama",
        strategy=load_strategy(strategy),
        global_batch=microbatches * job.pop("dp", 1),
        **({"gpus": 4} | job),
    )
    whole = predict(asked, engine="fast")
    return whole, predict(asked, engine="fast", microbatches="auto")


def simulated(prediction: Prediction) -> int:
    assert prediction.compiled is not None
    return prediction.compiled.plan.training.num_microbatches


def numbers(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of a result by path."""
    if isinstance(value, dict):
        rows = [(f"{path}.{key}", entry) for key, entry in value.items() if key not in NOT_OF_THE_PLAN]
    elif isinstance(value, list):
        rows = [(f"{path}[{i}]", entry) for i, entry in enumerate(value)]
    else:
        return {path: value}
    return {name: leaf for key, entry in rows for name, leaf in numbers(entry, key).items()}


def assert_same(short: Prediction, whole: Prediction) -> None:
    """Compare every number of two results; times and rates to 1e-6 of the step, bytes exactly."""
    step_s = whole.result["step_time_s"]
    found, wanted = (
        numbers({key: entry for key, entry in prediction.result.items() if key not in NOT_EXACT})
        for prediction in (short, whole)
    )
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, float):
            scale = step_s if name.endswith("_s") or ".breakdown_s" in name or ".bubble_s" in name else 1.0
            assert found[name] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE * scale), name
        else:
            assert found[name] == value, name


@pytest.mark.parametrize(
    ("strategy", "job"),
    [
        ("pp=1,tp=2,zero=2", {"dp": 2}),
        ("pp=1,zero=3,recompute=full", {"dp": 4}),
        ("pp=4,schedule=1f1b", {}),
        ("pp=2,tp=2,schedule=1f1b,recompute=full", {}),
        ("pp=2,zero=1,schedule=1f1b", {"dp": 2, "clip_grad_norm": None, "microbatches": 192}),
        ("pp=2,vp=4,schedule=interleaved_1f1b", {"dp": 2}),
        ("pp=2,vp=2,schedule=interleaved_zb", {"gpus": 2}),
        ("pp=4,schedule=zb_h1", {"microbatches": 288}),
        ("pp=2,schedule=zb_h2", {"gpus": 2, "microbatches": 288}),
        ("pp=2,vp=2,schedule=v_half", {"gpus": 2}),
        ("pp=2,vp=2,schedule=v_min", {"gpus": 2}),
    ],
)
@pytest.mark.parametrize("settings", [(), (("cost.contention", "off"),)], ids=["contention", "alone"])
def test_what_repeats_itself_is_predicted_exactly_from_fewer_microbatches(
    strategy: str, job: dict[str, Any], settings: tuple[tuple[str, str], ...]
) -> None:
    job = {"microbatches": 128} | job
    whole, short = both(strategy, settings=settings, **job)
    assert simulated(whole) == job["microbatches"]
    assert simulated(short) < simulated(whole)
    assert_same(short, whole)
    said = f"simulated with {simulated(short)} of {simulated(whole)} microbatches"
    assert short.result["warnings"][0].startswith(said)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES.keys() - PERIODS.keys()))
def test_other_schedules_are_simulated_whole(schedule: str) -> None:
    whole, short = both(f"pp=2,schedule={schedule}", microbatches=32, gpus=2)
    assert simulated(short) == 32
    assert_same(short, whole)


def test_a_smaller_last_microbatch_is_simulated_whole() -> None:
    asked = Job(model="tiny-llama", strategy=load_strategy("pp=2"), gpus=2, global_batch=63, micro_batch=2)
    found = predict(asked, microbatches="auto", engine="fast")
    assert simulated(found) == 32


def test_a_given_number_of_steps_is_kept() -> None:
    asked = Job(model="tiny-llama", strategy=load_strategy("pp=4"), gpus=4, global_batch=128)
    whole, short = (predict(asked, steps=5, engine="fast", microbatches=m) for m in ("all", "auto"))
    assert short.timeline.num_steps == 5
    assert simulated(short) < 128
    assert_same(short, whole)


def test_the_short_plan_has_the_same_phase_as_the_job() -> None:
    strategy = load_strategy("pp=4,vp=2,schedule=interleaved_1f1b")
    job = Job(model="tiny-llama", strategy=strategy, gpus=4, global_batch=128)
    counts = list(short_counts(prepare(job).resolved))
    assert counts
    assert all(count % 4 == 0 and count < 128 for count in counts)
    assert not list(short_counts(prepare(replace(job, global_batch=8)).resolved))


def test_only_all_and_auto_are_known() -> None:
    with pytest.raises(JobError, match="microbatches = 'som'"):
        predict(Job(model="tiny-llama"), microbatches="som")


@pytest.mark.parametrize("schedule", sorted(PERIODS))
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("vp", [1, 2, 3])
def test_rows_of_one_more_period_are_those_before_with_a_period_in_the_middle(
    schedule: str, pp: int, vp: int
) -> None:
    period = PERIODS[schedule](pp)
    takes_one_stage, takes_two = {"1f1b", "zb_h1", "zb_h2"}, {"v_half", "v_min", "dualpipe_v"}
    vp = 1 if schedule in takes_one_stage else 2 if schedule in takes_two else vp
    for count in (3 * pp + 3 * period, 6 * pp + 3 * period):
        short, long = (rows_of(schedule, pp, vp, -(-m // period) * period) for m in (count, count + period))
        for before, after in zip(short, long, strict=True):
            assert is_inserted(before, after, period=period)


def rows_of(schedule: str, pp: int, vp: int, microbatches: int) -> list[list[list[tuple[str, int]]]]:
    rows = schedule_rows(
        schedule, num_pipeline_ranks=pp, num_microbatches=microbatches, virtual_stages_per_rank=vp
    )
    return [[passes(slot) for slot in row] for row in show_rows(rows)]


def passes(slot: str | list[str]) -> list[tuple[str, int]]:
    found = [CODE.fullmatch(code) for code in ([slot] if isinstance(slot, str) else slot)]
    return [(match[1], int(match[2])) for match in found if match]


def is_inserted(
    short: list[list[tuple[str, int]]], long: list[list[tuple[str, int]]], *, period: int
) -> bool:
    """Tell whether `short` is a begin of `long` and an end of it for earlier microbatches."""
    moved = [[(name, number + period) for name, number in slot] for slot in short]
    same_begin = next((i for i, pair in enumerate(zip(short, long, strict=False)) if pair[0] != pair[1]), 0)
    backwards = zip(moved[::-1], long[::-1], strict=False)
    same_end = next((i for i, pair in enumerate(backwards) if pair[0] != pair[1]), len(short))
    return same_begin + same_end >= len(short)


@pytest.mark.parametrize("schedule", sorted(SAME_KINDS))
@pytest.mark.parametrize("rest", ["zero=1,recompute=full", "tp=2"])
def test_plans_of_other_counts_from_one_graph_are_those_compiled_alone(schedule: str, rest: str) -> None:
    takes_two = {"interleaved_1f1b", "interleaved_zb", "looped_bfs", "v_half", "v_min", "zbv", "dualpipe_v"}
    strategy = load_strategy(f"pp=2,{'vp=2,' if schedule in takes_two else ''}{rest},schedule={schedule}")
    bench = Workbench()
    for microbatches in (8, 4, 16):
        job = Job(model="tiny-llama", strategy=strategy, gpus=4, micro_batch=1, global_batch=microbatches * 2)
        shared, alone = prepare(job, bench=bench).plan(), compile_job(job, on_pass=lambda *_: None).plan
        assert plan_hash(shared) == plan_hash(alone)

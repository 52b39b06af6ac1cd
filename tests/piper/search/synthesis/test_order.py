"""Orders found for a job: they fit the bytes they are given, beat known schedules there, and run."""

from __future__ import annotations

from pathlib import Path

import pytest

from piper.predict import Job, compile_job, predict
from piper.search.synthesis import FoundOrder, OrderRequest, find_order
from piper.search.synthesis.measure import pipeline_of
from piper.strategy import Shorthand, Strategy, load_strategy
from piper.workbench import Workbench
from simulator import simulate
from simulator.plan.check import check_plan
from tests.piper.runtime.named_runs import require_equal, run_named

SIZES = {"global_batch": 12, "seq_len": 64, "cluster": "cpu", "dtype": "fp32", "optimizer": "sgd"}
RIVALS = ("zbv", "v_half", "dualpipe_v")


def job(strategy: str = "") -> Job:
    return Job(model="tiny-llama", gpus=4, strategy=Strategy.parse(strategy), **SIZES)


@pytest.fixture(scope="module")
def bench() -> Workbench:
    return Workbench()


@pytest.fixture(scope="module")
def found(bench: Workbench, tmp_path_factory: pytest.TempPathFactory) -> FoundOrder:
    """Find an order under the bytes of ZBV."""
    request = OrderRequest(
        job=job(),
        strategy=Shorthand(pp=4, dp=1),
        path=tmp_path_factory.mktemp("orders") / "order.csv",
        memory_bytes=result_of("zbv", bench)["needed_memory_bytes"],
    )
    order = find_order(request, bench=bench)
    assert order is not None
    return order


def result_of(schedule: str, bench: Workbench) -> dict[str, object]:
    return predict(job(f"pp=4,dp=1,schedule={schedule}"), bench=bench).result


def test_at_the_bytes_of_zbv_an_order_is_faster_than_every_v_schedule_that_fits(
    found: FoundOrder, bench: Workbench
) -> None:
    results = [result_of(name, bench) for name in RIVALS]
    room = results[0]["needed_memory_bytes"]
    assert found.result["needed_memory_bytes"] <= room
    fitting = [r["step_time_s"] for r in results if r["needed_memory_bytes"] <= room]
    assert found.result["step_time_s"] < min(fitting)


def test_the_file_is_a_strategy_whose_plan_passes_the_checks_and_gives_the_time_that_was_told(
    found: FoundOrder, bench: Workbench
) -> None:
    entry = found.to_json()
    assert Path(str(entry["schedule_file"])).is_file()
    again = job(str(entry["strategy"]))
    assert check_plan(compile_job(again).plan) == []
    assert predict(again, bench=bench).result["step_time_s"] == entry["step_time_s"]
    assert entry["pipeline_s"] >= entry["pipeline_bound_s"]


def test_the_order_runs_and_equals_one_process_in_every_bit(found: FoundOrder) -> None:
    require_equal(run_named("tiny-llama", str(found.strategy), steps=2, **SIZES))


def test_nothing_is_found_where_not_even_one_microbatch_fits_and_no_file_is_left(
    bench: Workbench, tmp_path: Path
) -> None:
    path = tmp_path / "order.csv"
    request = OrderRequest(job=job(), strategy=Shorthand(pp=4, dp=1), path=path, memory_bytes=2**20)
    assert find_order(request, bench=bench) is None
    assert not path.exists()


def test_a_pipeline_measured_in_a_plan_has_its_passes_hops_and_bytes() -> None:
    """Stage by stage, against the plan's own tasks and buffers."""
    from piper.predict import prepare

    prepared = prepare(
        Job(
            model="tiny-llama",
            strategy=load_strategy("pp=2,schedule=zb_h1"),
            **SIZES | {"cluster": "dgx-h100"},
        )
    )
    plan = prepared.plan()
    timeline = simulate(plan, prepared.cost_model, steps=1)
    pipeline = pipeline_of(plan, timeline, num_microbatches=6, spare_bytes=0)
    spans = {
        track.codes[task]: (start, end)
        for track in timeline.tracks
        for task, start, end in zip(
            track.task.tolist(), track.start_ns.tolist(), track.end_ns.tolist(), strict=True
        )
    }
    assert pipeline.stages == ((0,), (1,))
    assert pipeline.num_microbatches == 6
    for stage in (0, 1):
        start, end = spans[f"{stage}F5"]
        assert pipeline.forward_ns[stage] == pytest.approx(end - start, rel=0.05)
        assert 0 < pipeline.left_bytes[stage] < pipeline.held_bytes[stage]
    assert 0 < pipeline.hop_ns[0] <= spans["1RECV_F0"][1] - spans["0F0"][1]
    # What a rank may hold is what it held, plus what the worst rank had beyond it.
    assert max(pipeline.cap_bytes) >= max(pipeline.held_bytes)

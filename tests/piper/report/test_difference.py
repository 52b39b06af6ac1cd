"""A prediction and a measurement of one plan, per kind of task."""

from pathlib import Path

import pytest

from cost_models.calibration.anchor import BOUNDS, slower
from cost_models.catalogue import cluster_content
from cost_models.documents import yaml_text
from piper.errors import JobError
from piper.predict import Job, compile_job, predict_plan
from piper.report.anchor import anchor_to_result, anchor_to_step_time, step_time_of_log
from piper.report.difference import difference, difference_text, suggestion
from piper.report.result import Result
from piper.strategy import Strategy
from simulator.plan import Plan


def plan_of(strategy: str, gpus: int) -> Plan:
    job = Job(model="tiny-llama", strategy=Strategy.parse(strategy), gpus=gpus, global_batch=8)
    return compile_job(job).plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of("pp=2", 2)


def result(plan: Plan, cluster: str) -> Result:
    found = predict_plan(plan, cluster=cluster)
    return Result(name=cluster, summary=found.result, timeline=found.timeline, plan=plan)


@pytest.fixture(scope="module")
def slow(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """What a machine would measure whose kernels take 1.5 times, whose messages 3 times as long."""
    path = tmp_path_factory.mktemp("slow") / "slow.yaml"
    factors = {"compute": 1.5, "communication": 3.0, "host": 1.2}
    path.write_text(yaml_text(slower(cluster_content("dgx-h100"), factors, stack="piper", launch_s=10e-6)))
    return result(plan, str(path))


def test_equal_results_differ_nowhere(plan: Plan) -> None:
    found = difference(result(plan, "dgx-h100"), result(plan, "dgx-h100"))
    assert {kind.ratio for kind in found.kinds if kind.kind != "waiting"} == {1.0}
    assert "nothing to refit" in suggestion(found)


def test_shares_of_what_the_compute_stream_does_and_waits_add_up_to_the_difference(
    plan: Plan, slow: Result
) -> None:
    found = difference(result(plan, "dgx-h100"), slow)
    assert sum(kind.share for kind in found.kinds if kind.share is not None) == pytest.approx(1.0)
    assert {kind.kind for kind in found.kinds if kind.share is None} >= {"SEND_F", "RECV_B"}
    assert found.factors["communication"] == pytest.approx(3.0, rel=0.05)


def test_the_text_shows_step_memory_kinds_and_what_to_do(plan: Plan, slow: Result) -> None:
    text = difference_text(difference(result(plan, "dgx-h100"), slow))
    assert "step time" in text
    assert "memory" in text
    assert "waiting" in text
    assert "communication by 3" in text


def test_results_of_two_plans_are_not_compared(slow: Result) -> None:
    with pytest.raises(JobError, match="must be those of"):
        difference(result(plan_of("pp=4", 4), "dgx-h100"), slow)


def test_an_anchor_finds_the_factors_of_a_slower_machine(plan: Plan, slow: Result) -> None:
    found = anchor_to_result(cluster_content("dgx-h100"), plan, slow, stack="piper")
    assert found.factors["communication"] == pytest.approx(3.0, rel=0.05)
    assert found.factors["host"] == pytest.approx(1.2, rel=0.05)  # tiny kernels wait for their launches
    assert found.after_s == pytest.approx(found.measured_s, rel=0.01)
    assert found.at_bounds == ()


def test_an_anchor_stays_within_its_bounds(plan: Plan) -> None:
    found = anchor_to_step_time(cluster_content("dgx-h100"), plan, 1e3, stack="piper")
    assert dict(found.factors) == {name: bounds[1] for name, bounds in BOUNDS.items()}
    assert found.at_bounds == tuple(BOUNDS)
    assert found.after_s < found.measured_s


@pytest.mark.parametrize(
    "line",
    [
        " iteration 7/10 | elapsed time per iteration (ms): 250.0 | loss: 3",
        "step 3 loss 2.0 step_time_s: 0.25",
        "step_time: 250.0 ms",
        "train_step_timing in s: 0.25",
    ],
)
def test_logs_of_many_tools_tell_the_step_time_without_the_first(line: str, tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("\n".join([line.replace("25", "95"), line, line]))
    assert step_time_of_log(str(path)) == pytest.approx(0.25)


def test_a_log_without_step_times_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("loss 3.0\n")
    with pytest.raises(JobError, match="has no step times"):
        step_time_of_log(str(path))

"""Periods of steady runs, and runs that look steady and are not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulator import Timeline, build_workload, simulate, summarize
from simulator.plan import Plan, TaskKind
from simulator.repetition import Repetition, find_repetition
from tests.plans import Costs, FakeCostModel, gpipe_rows, one_f_one_b_rows, pipeline_plan

K = TaskKind
PRICES = FakeCostModel(transfer_ns=lambda *_: 10, launch_ns=1)
COSTS = Costs(forward_ns=1000, backward_ns=2000)


def run(
    m: int, *, slow_rank: int | None = None, steps: int | str = "auto", ahead: int | None = None
) -> tuple[Plan, Timeline]:
    """Simulate 1F1B on 4 ranks, one of them 1 % slower; `ahead`: on 2, the first with that many in flight."""
    rows = one_f_one_b_rows(4, m)
    if ahead is not None:
        late = [((K.F, i + ahead), (K.B, i)) for i in range(m)]
        first = [(K.F, i) for i in range(ahead)] + [slot for pair in late for slot in pair if slot[1] < m]
        rows = [first, one_f_one_b_rows(2, m)[1]]
    plan = pipeline_plan(rows, costs=COSTS)
    workload = build_workload(plan, PRICES)
    if slow_rank is not None:
        first, last = workload.device_starts[slow_rank : slow_rank + 2]
        duration_ns = workload.duration_ns.copy()
        duration_ns[first:last] += duration_ns[first:last] // 100
        workload = replace(workload, duration_ns=duration_ns)
    return plan, simulate(plan, PRICES, workload=workload, steps=steps)


def found(plan: Plan, timeline: Timeline, *, times: int, tolerance: float = 1e-6) -> Repetition | None:
    return find_repetition(
        plan,
        timeline,
        microbatches=len(plan.device_plans),
        times=times // len(plan.device_plans),
        tokens_per_step=8,
        tolerance=tolerance,
    )


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("slow_rank", [None, 3])
def test_insertions_give_the_step_ends_of_the_longer_run(steps: int, slow_rank: int | None) -> None:
    plan, timeline = run(16, slow_rank=slow_rank, steps=steps)
    repetition = found(plan, timeline, times=40)
    assert repetition is not None
    _, longer = run(56, slow_rank=slow_rank, steps=steps)
    assert repetition.step_ends_ns(timeline.step_end_ns).tolist() == longer.step_end_ns.tolist()


def test_equal_growth_is_no_steady_state_while_a_queue_runs_empty() -> None:
    """The first rank is the slower one, but the last has enough to do for a long time."""
    late = {"slow_rank": 0, "ahead": 40, "steps": 1}
    ends = {m: run(m, **late)[1].step_time_ns for m in (60, 61, 62, 500)}
    growth = ends[61] - ends[60]
    assert ends[62] - ends[61] == growth
    assert ends[500] > ends[62] + 1.005 * 438 * growth
    assert found(*run(62, **late), times=438) is None
    assert found(*run(62, **late), times=438, tolerance=0.1) is not None


def test_forwards_that_pile_up_are_no_period() -> None:
    plan = pipeline_plan(gpipe_rows(2, 16), costs=COSTS)
    assert found(plan, simulate(plan, PRICES), times=4) is None


def test_too_few_microbatches_show_no_period() -> None:
    assert found(*run(4), times=4) is None


def test_tasks_of_the_period_count_as_often_as_they_are_repeated() -> None:
    plan, timeline = run(16)
    repetition = found(plan, timeline, times=40)
    assert repetition is not None
    kinds = np.concatenate([device.tasks.kind for device in plan.device_plans])
    assert repetition.copies[kinds == K.F].sum() == 4 * 56
    assert repetition.copies[kinds == K.UPDATE].tolist() == [1] * 4


def test_peaks_behind_the_insertion_come_later() -> None:
    plan, timeline = run(16, steps=2)
    repetition = found(plan, timeline, times=40)
    assert repetition is not None
    first, second = repetition.ends_ns.tolist()
    assert repetition.moved_ns(first - 1) == first - 1
    assert repetition.moved_ns(first) == first + repetition.inserted_ns
    assert repetition.moved_ns(second) == second + 2 * repetition.inserted_ns


def test_the_summary_of_a_run_with_insertions_is_that_of_the_longer_run() -> None:
    plan, timeline = run(16)
    repetition = found(plan, timeline, times=40)
    assert repetition is not None
    short = summarize(plan, timeline, PRICES, repetition=repetition)
    longer, whole_timeline = run(56)
    whole = summarize(longer, whole_timeline, PRICES)
    for name in ("step_time_s", "makespan_s", "breakdown_s", "bubble_s", "ranks", "provenance"):
        assert short[name] == whole[name], name

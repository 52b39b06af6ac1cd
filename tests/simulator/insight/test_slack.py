"""Slack and the critical path, held against simulating again with one task delayed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import build_workload, simulate
from simulator.engines import load_engine
from simulator.insight import critical_path, slack_ns
from simulator.plan import NONE, IndexLists, TaskKind
from tests.plans import Costs, FakeCostModel, PlanBuilder, one_f_one_b_rows, pipeline_plan
from tests.random_plans import PRICES, plans

K = TaskKind
HOST_PRICES = st.builds(
    lambda prices, ahead, blocking: replace(prices, run_ahead_kernels=ahead, blocking=tuple(blocking)),
    PRICES,
    st.sampled_from([None, 1, 2, 5]),
    st.lists(st.sampled_from(["f", "b", "update", "all_reduce"]), max_size=2, unique=True),
)
"""Hosts that run ahead so far and no further, and await the end of some tasks."""


class Step:
    """A plan simulated once, and again with changed times."""

    def __init__(self, plan, prices, steps=1):
        self.plan, self.prices, self.steps = plan, prices, steps
        self.work = build_workload(plan, prices)
        self.timeline = simulate(plan, prices, steps=steps, workload=self.work)
        self.end = self._column("end_ns")
        self.slack = slack_ns(self.work, self.timeline)

    def _column(self, name):
        rows = [getattr(track, name).reshape(self.steps, -1) for track in self.timeline.tracks]
        return np.concatenate(rows, axis=1)

    def delayed(self, task, by_ns):
        """Return the end of the step when `task`, and what it meets, end later: from when they ended."""
        work, duration = self.work, self.work.duration_ns.copy()
        start = self._column("start_ns")[0]
        together = [task]
        if work.collective[task] != NONE:
            together = list(work.members.row(int(work.collective[task])))
        elif work.partner[task] != NONE and not work.eager[task]:
            together += [int(work.partner[task])]
        for one in together:
            duration[one] = self.end[0, one] - int(start[one]) + by_ns
        changed = replace(work, duration_ns=duration)
        return simulate(self.plan, self.prices, steps=1, workload=changed).makespan_ns


@settings(max_examples=60, deadline=None)
@given(step=st.builds(Step, plans(), HOST_PRICES), data=st.data())
def test_a_delay_up_to_the_slack_does_not_move_the_end_and_one_more_moves_it_by_one(*, step, data):
    end = step.timeline.makespan_ns
    with_a_duration = np.flatnonzero(~step.work.eager | step.work.is_send).tolist()  # others: their sender's
    for task in data.draw(st.lists(st.sampled_from(with_a_duration), min_size=1, max_size=6)):
        slack = int(step.slack[0, task])
        assert step.delayed(task, 0) == end
        assert step.delayed(task, slack) == end
        assert step.delayed(task, slack + 1) == end + 1


@settings(max_examples=60, deadline=None)
@given(step=st.builds(Step, plans(), HOST_PRICES, st.integers(1, 3)))
def test_the_path_has_no_gap_and_what_runs_on_it_has_no_slack(step):
    parts = critical_path(step.work, step.timeline).parts
    assert [part.begin_ns for part in parts] == [0, *(part.end_ns for part in parts)][: len(parts)]
    assert (parts[-1].end_ns if parts else 0) == step.timeline.makespan_ns
    assert not any(step.slack.ravel()[part.instance] for part in parts if not part.is_host)
    assert (step.slack >= 0).all()
    if not len(step.work.host_waits.values):
        assert not any(part.is_host for part in parts[1:])


def test_the_path_goes_on_at_the_task_whose_end_a_host_awaits():
    builder = PlanBuilder(pipeline_ranks=1)
    for name, time_ns in (("a", 50), ("b", 3), ("c", 4)):
        builder.devices[0].compute(name, time_ns, microbatch="abc".index(name))
    step = Step(builder.build(), FakeCostModel(launch_ns=10, blocking=("f",)))
    parts = critical_path(step.work, step.timeline).parts
    assert [(p.instance, p.begin_ns, p.end_ns, p.is_host) for p in parts] == [
        (0, 0, 10, True), (0, 10, 60, False), (1, 60, 70, True), (1, 70, 73, False),
        (2, 73, 83, True), (2, 83, 87, False),
    ]  # fmt: skip
    assert step.slack.tolist() == [[0, 0, 0]]


def unrolled(work, steps):
    """Return a workload of one step that does what `steps` steps do, and its task by [step, task]."""
    sizes = np.diff(work.device_starts)
    device = np.repeat(np.arange(len(sizes)), sizes)
    first = np.arange(work.num_tasks) - work.device_starts[device]
    place = (steps * work.device_starts[device] + first) + np.arange(steps)[:, None] * sizes[device]
    before = np.argsort(place.ravel())
    task, step = before % work.num_tasks, before // work.num_tasks
    waits = [[int(place[s, w]) for w in work.waits.row(t)] for t, s in zip(task, step, strict=True)]
    for row, t, s in zip(waits, task.tolist(), step.tolist(), strict=True):
        row += [int(place[s - 1, w]) for w in work.previous_step_waits.row(t)] if s else []
    host_waits = [
        [int(place[s + min(w // work.num_tasks, 0), w]) for w in work.host_waits.row(t) if s or w >= 0]
        for t, s in zip(task.tolist(), step.tolist(), strict=True)
    ]
    count = len(work.members.starts) - 1
    groups = [[int(place[s, t]) for t in work.members.row(c)] for s in range(steps) for c in range(count)]
    repeated = {
        name: getattr(work, name)[task]
        for name in (
            "is_compute", "is_host_copy", "stream", "duration_ns", "launch_ns", "host_ns", "is_send", "eager",
            "price",
        )
    }  # fmt: skip
    moved = np.where(work.partner[task] == NONE, NONE, place[step, work.partner[task]])
    number = np.where(work.collective[task] == NONE, NONE, work.collective[task] + step * count)
    long = replace(
        work, **repeated, device_starts=steps * work.device_starts, partner=moved, collective=number,
        waits=IndexLists.from_rows(waits), previous_step_waits=IndexLists.from_rows([[]] * len(task)),
        host_waits=IndexLists.from_rows(host_waits),
        members=IndexLists.from_rows(groups), codes=tuple(work.codes[t] for t in task),
    )  # fmt: skip
    return long, place


def end_of(work):
    """Return the end of a workload's only step."""
    return int(load_engine("reference")(work, max_steps=1, settled=lambda _: False).step_end_ns[-1])


@settings(max_examples=40, deadline=None)
@given(step=st.builds(Step, plans(), HOST_PRICES, st.integers(2, 3)), data=st.data())
def test_over_several_steps_a_computation_may_be_late_by_its_slack_in_one_of_them(*, step, data):
    long, place = unrolled(step.work, step.steps)
    assert end_of(long) == step.timeline.makespan_ns
    compute = np.flatnonzero(step.work.is_compute)
    for _ in range(4):
        task = int(data.draw(st.sampled_from(compute.tolist())))
        number = data.draw(st.integers(0, step.steps - 1))
        took = step.end[number, task] - step._column("start_ns")[number, task]
        for late, moved in ((0, 0), (step.slack[number, task], 0), (step.slack[number, task] + 1, 1)):
            duration = long.duration_ns.copy()
            duration[place[number, task]] = took + late
            assert end_of(replace(long, duration_ns=duration)) == step.timeline.makespan_ns + moved


def test_a_message_that_waits_for_nobody_has_the_slack_of_what_receives_it():
    builder = PlanBuilder(pipeline_ranks=2)
    builder.devices[0].compute("a", 10, microbatch=0)
    builder.transfer(0, 1, sent_after=["a"])
    builder.devices[1].compute("c", 30, microbatch=1)
    builder.devices[1].compute("b", 5, microbatch=0, waits=["recv x"])
    step = Step(builder.build(), FakeCostModel(transfer_ns=lambda *_: 7))
    found = dict(zip(step.work.codes, step.slack[0].tolist(), strict=True))
    assert sorted(found.values()) == [0, 0, 13, 13, 13]


def test_every_pass_of_a_pipeline_without_steady_bubble_that_is_on_the_path_is_named_by_kind():
    plan = pipeline_plan(one_f_one_b_rows(2, 3), costs=Costs(forward_ns=1, backward_ns=2))
    step = Step(plan, FakeCostModel())
    path = critical_path(step.work, step.timeline)
    assert sum(path.by_kind_ns(plan).values()) == 12
    assert set(path.by_kind_ns(plan)) <= {"F", "B"}
    assert sum(path.by_rank_ns(step.work).values()) == 12


def test_of_several_steps_the_path_of_the_last_fills_its_window():
    plan = pipeline_plan(one_f_one_b_rows(3, 4), costs=Costs(forward_ns=2, backward_ns=3, update_ns=1))
    step = Step(plan, FakeCostModel(transfer_ns=lambda *_: 1), steps=3)
    path = critical_path(step.work, step.timeline)
    assert sum(path.by_kind_ns(plan).values()) == step.timeline.step_time_ns

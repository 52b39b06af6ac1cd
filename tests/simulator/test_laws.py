"""Laws of every legal plan, tried on random ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import build_workload, simulate
from simulator.engines import ENGINES
from simulator.plan import NONE
from simulator.timeline.attribution import attribute
from tests.attribution_one_by_one import labels_one_by_one, phases_one_by_one
from tests.plans import FakeCostModel, exact_price
from tests.random_plans import PRICES, plans
from tests.random_sharing import random_sharing
from tests.strategies import compile_drawn, drawn


class _Run:
    """A plan with its workload and a timeline whose columns are put together: [steps, tasks].

    `choose`: of what is shared and how durations vary from step to step, or None: nothing is shared.
    """

    def __init__(self, plan, prices, steps, engine, choose=None):
        self.plan, self.prices, self.engine = plan, prices, engine
        self.work = build_workload(plan, prices)
        if choose is not None:
            self.work = shared(self.work, choose)
        self.timeline = self.simulated(self.work, steps)
        for name in ("start_ns", "end_ns", "ready_ns", "dispatch_ns"):
            rows = [getattr(track, name).reshape(steps, -1) for track in self.timeline.tracks]
            setattr(self, name, np.concatenate(rows, axis=1))
        self.alone_ns = np.stack([self.work.step_duration_ns(step) for step in range(steps)])

    def simulated(self, work, steps):
        return simulate(self.plan, self.prices, steps=steps, workload=work, engine=self.engine)


def shared(work, choose):
    """Return the workload where links, processors and memory are shared, sometimes with noise."""
    noisy = None
    if choose.random() < 0.5:
        noise = [[choose.randint(-3, 9) for _ in range(work.num_tasks)] for _ in range(2)]
        noisy = np.maximum(work.duration_ns + np.array(noise, dtype=np.int64).reshape(2, -1), 0)
    return replace(work, noisy_ns=noisy, sharing=random_sharing(work, choose))


ENGINE_NAMES, STEPS = st.sampled_from(list(ENGINES)), st.integers(1, 3)
RANDOM = st.randoms(use_true_random=False)
SHARED_RUNS = st.builds(_Run, plans(), PRICES, STEPS, ENGINE_NAMES, RANDOM)
RUNS = st.one_of(st.builds(_Run, plans(), PRICES, STEPS, ENGINE_NAMES), SHARED_RUNS)
SEEDS = [*range(40), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40, 400))]
LAWS = settings(max_examples=30, deadline=None)


@LAWS
@given(run=RUNS)
def test_every_wait_is_honoured_within_a_step_and_across_steps(run):
    for task in range(run.work.num_tasks):
        for wait in run.work.waits.row(task):
            assert (run.end_ns[:, wait] <= run.ready_ns[:, task]).all()
        for wait in run.work.previous_step_waits.row(task):
            assert (run.end_ns[:-1, wait] <= run.ready_ns[1:, task]).all()


@LAWS
@given(run=RUNS)
def test_spans_of_a_stream_follow_one_another_in_dispatch_order(run):
    for stream in range(run.work.num_streams):
        tasks = np.flatnonzero(run.work.stream == stream)
        starts, ends = run.start_ns[:, tasks].ravel(), run.end_ns[:, tasks].ravel()
        assert (starts[1:] >= ends[:-1]).all()
    assert (run.ready_ns <= run.start_ns).all()
    assert (run.start_ns <= run.end_ns).all()


@LAWS
@given(run=RUNS)
def test_work_is_conserved_and_no_task_beats_its_price_or_its_host(run):
    took, compute = run.end_ns - run.start_ns, run.work.is_compute
    alone = run.alone_ns[:, drivers(run.work)]
    received_late = (run.work.partner != NONE) & run.work.eager & ~run.work.is_send
    assert (took >= alone)[:, ~received_late].all()
    assert (run.end_ns >= run.dispatch_ns).all()
    if run.work.sharing is None:
        assert (took == alone)[:, ~compute & ~received_late].all()
        assert (took <= alone)[:, received_late].all()
        stretched = (took > alone)[:, compute]
        assert (run.end_ns[:, compute] == run.dispatch_ns[:, compute])[stretched].all()


def drivers(work):
    """Return by task who says how long it takes: itself, the sender, or the first member of a collective."""
    found = np.arange(work.num_tasks)
    receives = (work.partner != NONE) & ~work.is_send
    found[receives] = work.partner[receives]
    for members in work.members.to_rows():
        found[members] = members[0]
    return found


@LAWS
@given(run=SHARED_RUNS)
def test_sharing_makes_nothing_earlier(run):
    alone = run.simulated(replace(run.work, sharing=None), run.timeline.num_steps)
    for shared_track, track in zip(run.timeline.tracks, alone.tracks, strict=True):
        assert (shared_track.start_ns >= track.start_ns).all()
        assert (shared_track.end_ns >= track.end_ns).all()


@LAWS
@given(run=SHARED_RUNS)
def test_no_link_carries_more_than_it_can(run):
    """What all flows put on a link, at full speed, takes the link at most as long as the run lasts."""
    share, work = run.work.sharing, run.work
    carried_ns = np.zeros(share.num_links)
    wire_ns = np.maximum(run.alone_ns - share.latency_ns[work.price], 0).sum(axis=0)
    for task in np.flatnonzero((drivers(work) == np.arange(work.num_tasks)) & ~work.is_compute):
        entries = slice(*share.link_starts[work.price[task] : work.price[task] + 2])
        carried_ns[share.links[entries]] += share.uses[entries] * wire_ns[task]
    assert (carried_ns <= run.timeline.makespan_ns * (1 + 1e-6)).all()


@LAWS
@given(run=RUNS)
def test_a_transfer_ends_after_both_ends_have_started_and_members_of_a_collective_run_together(run):
    recvs = np.flatnonzero((run.work.partner != NONE) & ~run.work.is_send)
    sends = run.work.partner[recvs]
    assert (run.end_ns[:, recvs] >= np.maximum(run.start_ns[:, recvs], run.start_ns[:, sends])).all()
    rendezvous = ~run.work.eager[recvs]
    assert (run.end_ns[:, recvs] == run.end_ns[:, sends])[:, rendezvous].all()
    for members in run.work.members.to_rows():
        assert (run.start_ns[:, members] == run.ready_ns[:, members].max(axis=1, keepdims=True)).all()
        assert (run.end_ns[:, members] == run.end_ns[:, members[:1]]).all()


@LAWS
@given(run=RUNS)
def test_the_makespan_is_at_least_the_critical_path_and_the_busiest_stream_and_host(run):
    steps, work = run.timeline.num_steps, run.work
    longest = np.zeros(work.num_tasks, dtype=np.int64)
    received_late = work.eager & ~work.is_send
    floor = np.where(received_late, 0, run.alone_ns[:, drivers(work)].min(axis=0))
    for task in range(work.num_tasks):
        before = [int(longest[wait]) for wait in work.waits.row(task)]
        longest[task] = max(before, default=0) + floor[task]
    streams = [int(floor[work.stream == stream].sum()) * steps for stream in range(work.num_streams)]
    hosts = [
        int(work.host_ns[a:b].sum()) * steps
        for a, b in zip(work.device_starts[:-1], work.device_starts[1:], strict=True)
    ]
    assert run.timeline.makespan_ns >= max(int(longest.max()), *streams, *hosts)
    assert run.timeline.makespan_ns == run.end_ns.max()


@LAWS
@given(run=RUNS)
def test_memory_never_falls_below_its_static_part_and_ends_where_it_began(run):
    for device, track in zip(run.plan.device_plans, run.timeline.tracks, strict=True):
        totals = track.memory_bytes.sum(axis=1)
        assert (np.diff(track.memory_ns) > 0).all()
        assert totals.max() >= device.buffers.static_bytes
        assert totals.min() >= device.buffers.static_bytes
        assert totals[-1] == device.buffers.static_bytes
        assert track.memory_bytes.min() >= 0


@LAWS
@given(run=RUNS)
def test_attribution_labels_every_instant_of_every_rank_exactly_once(run):
    found = attribute(run.plan, run.timeline)
    assert (found.label_ns.sum(axis=1) == run.timeline.step_time_ns).all()
    assert found.label_ns.min() >= 0
    parts = found.breakdown_s()
    step_s = run.timeline.step_time_ns / 1e9
    assert abs(sum(parts.values()) - step_s) <= 1e-9 * step_s
    assert found.label_ns.tolist() == labels_one_by_one(run.plan, run.timeline)
    assert found.bubble_ns.tolist() == phases_one_by_one(run.plan, run.timeline)


@LAWS
@given(run=RUNS, choose=st.randoms(use_true_random=False))
def test_attribution_takes_measured_spans_that_overlap_or_are_late(run, choose):
    """A measured timeline: spans begin and end somewhat off, and the window may cut them."""
    timeline = run.timeline

    def off(track):
        start = track.start_ns + np.array([choose.randrange(4) for _ in track.start_ns])
        end = start + np.array([choose.randrange(9) for _ in start])
        return replace(track, start_ns=start, end_ns=end)

    tracks = tuple(off(track) for track in timeline.tracks)
    ends = np.sort(timeline.step_end_ns + np.array([choose.randrange(9) for _ in timeline.step_end_ns]))
    measured = replace(timeline, source="measured", tracks=tracks, step_end_ns=ends)
    found = attribute(run.plan, measured)
    assert found.label_ns.tolist() == labels_one_by_one(run.plan, measured)


@LAWS
@given(run=RUNS)
def test_more_steps_change_nothing_in_the_steps_before(run):
    """Without sharing: a further step that a rank runs ahead into takes links from this one."""
    work = replace(run.work, sharing=None)
    short, long = (run.simulated(work, steps) for steps in (2, 4))
    for few, many in zip(short.tracks, long.tracks, strict=True):
        kept = many.step < 2
        assert many.start_ns[kept].tolist() == few.start_ns.tolist()
        assert many.end_ns[kept].tolist() == few.end_ns.tolist()


@LAWS
@given(run=RUNS)
def test_the_same_plan_gives_the_same_rows_twice(run):
    assert run.simulated(run.work, run.timeline.num_steps).rows() == run.timeline.rows()


@LAWS
@given(run=RUNS)
def test_every_time_is_a_whole_number_of_ns_in_64_bits(run):
    for track in run.timeline.tracks:
        for name in ("dispatch_ns", "ready_ns", "start_ns", "end_ns", "memory_ns", "memory_bytes"):
            assert getattr(track, name).dtype == np.int64, name
    assert run.timeline.step_end_ns.dtype == np.int64


class PricedBySize(FakeCostModel):
    """A FLOP of an operation takes a nanosecond."""

    def operation(self, operation):
        return exact_price(operation.flops)


@pytest.mark.parametrize("seed", SEEDS)
def test_attribution_of_a_random_strategy_is_that_of_every_instant(seed):
    plan = compile_drawn(drawn(seed), verified=False)
    timeline = simulate(plan, PricedBySize(launch_ns=seed % 3 * 40, transfer_ns=lambda size, *_: size))
    found = attribute(plan, timeline)
    assert found.label_ns.tolist() == labels_one_by_one(plan, timeline)
    assert found.bubble_ns.tolist() == phases_one_by_one(plan, timeline)

"""Laws of every legal plan; random plans whose tasks are issued in one global order cannot hang."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import build_workload, simulate
from simulator.plan import NONE, MemoryClass, TaskKind
from simulator.timeline.attribution import attribute
from tests.plans import FakeCostModel, PlanBuilder

K = TaskKind


@st.composite
def plans(draw):
    """Return a plan of up to 4 device plans; each action is appended to all devices it concerns."""
    ranks = draw(st.integers(1, 4))
    builder = PlanBuilder(pipeline_ranks=ranks, replicas=draw(st.integers(1, 3)))
    builder.held = [[] for _ in range(ranks)]
    world = builder.group("world", "dp", range(ranks))
    own = [builder.group(f"dp{rank}", "dp", [rank]) for rank in range(ranks)]
    for device in builder.devices:
        device.buffer("weights", draw(st.integers(0, 5)), MemoryClass.PARAMETERS, persistent=True)
        device.bucket("d")
    for number in range(draw(st.integers(1, 25))):
        kinds = ["compute", "compute", "own", "world", "copy"] + (["transfer"] * 3 if ranks > 1 else [])
        _append(draw, builder, draw(st.sampled_from(kinds)), number, own, world)
    for device, held in zip(builder.devices, builder.held, strict=True):
        device.compute("last", 1, K.UPDATE, waits=[], frees=held)
        _previous_step_waits(draw, device)
    return builder.build()


def _append(draw, builder, what, number, own, world):
    ranks = len(builder.devices)
    rank = draw(st.integers(0, ranks - 1))
    name = f"t{number}"
    if what == "compute":
        _compute(draw, builder, rank, name, number)
    elif what == "own":
        kind = draw(st.sampled_from([K.ALL_REDUCE, K.ALL_TO_ALL, K.RING_SHIFT]))
        builder.devices[rank].task(
            name, kind, draw(st.sampled_from(["dp", "compute"])), group=own[rank], bucket=0,
            microbatch=number, size_bytes=draw(st.integers(0, 9)), waits=_waits(draw, builder.devices[rank]),
        )  # fmt: skip
    elif what == "copy":
        kind, stream = (draw(st.sampled_from(some)) for some in ([K.OFFLOAD, K.RELOAD], ["host", "compute"]))
        builder.devices[rank].task(
            name, kind, stream, microbatch=number, phase=K.F, size_bytes=draw(st.integers(0, 9)),
            waits=_waits(draw, builder.devices[rank]),
        )  # fmt: skip
    elif what == "world":
        kind, size = draw(st.sampled_from([K.ALL_REDUCE, K.RING_SHIFT])), draw(st.integers(0, 9))
        for device in builder.devices:
            device.task(name, kind, "dp", stage=NONE, microbatch=number, group=world, size_bytes=size,
                        waits=_waits(draw, device))  # fmt: skip
    else:
        other = draw(st.integers(0, ranks - 1).filter(lambda r: r != rank))
        builder.transfer(
            rank, other, kind=draw(st.sampled_from([K.SEND_F, K.SEND_B])), name=name, microbatch=number,
            size_bytes=draw(st.integers(0, 9)), sent_after=_waits(draw, builder.devices[rank]),
            received_after=_waits(draw, builder.devices[other]),
        )  # fmt: skip


def _compute(draw, builder, rank, name, number):
    """Append a compute task that allocates a buffer and frees some of those that are held."""
    device, held = builder.devices[rank], builder.held[rank]
    device.buffer(name, draw(st.integers(0, 9)), draw(st.sampled_from(list(MemoryClass))))
    held.append(name)
    frees = [held.pop(0) for _ in range(draw(st.integers(0, len(held))))]
    kind = draw(st.sampled_from([K.F, K.B, K.BI, K.BW, K.R, K.UPDATE]))
    device.compute(name, draw(st.integers(0, 20)), kind, microbatch=number,
                   kernels=draw(st.integers(1, 3)), waits=_waits(draw, device),
                   allocates=[name], frees=frees)  # fmt: skip


def _waits(draw, device):
    return (
        draw(st.lists(st.sampled_from(list(device.names)), max_size=3, unique=True)) if device.names else []
    )


def _previous_step_waits(draw, device):
    index = draw(st.integers(0, len(device.tasks) - 1))
    device.later.append((index, tuple(_waits(draw, device))))


PRICES = st.builds(
    lambda launch, eager, transfer, collective, copy: FakeCostModel(
        launch_ns=launch,
        eager_limit_bytes=eager,
        transfer_ns=lambda size, source, target: transfer * size,
        collective_ns=lambda kind, size, ranks: collective * len(ranks),
        host_copy_ns=lambda size: copy * size,
    ),
    *[st.integers(0, 5)] * 5,
)


class _Run:
    """A plan with its workload and a timeline whose columns are put together: [steps, tasks]."""

    def __init__(self, plan, prices, steps):
        self.plan = plan
        self.work = build_workload(plan, prices)
        self.timeline = simulate(plan, prices, steps=steps, workload=self.work)
        for name in ("start_ns", "end_ns", "ready_ns", "dispatch_ns"):
            rows = [getattr(track, name).reshape(steps, -1) for track in self.timeline.tracks]
            setattr(self, name, np.concatenate(rows, axis=1))


RUNS = st.builds(_Run, plans(), PRICES, st.integers(1, 3))
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
    took = run.end_ns - run.start_ns
    compute = run.work.is_compute
    received_late = (run.work.partner != NONE) & run.work.eager & ~run.work.is_send
    assert (took[:, ~compute & ~received_late] == run.work.duration_ns[~compute & ~received_late]).all()
    assert (took[:, compute] >= run.work.duration_ns[compute]).all()
    assert (took[:, received_late] <= run.work.duration_ns[received_late]).all()
    assert (run.end_ns >= run.dispatch_ns).all()
    stretched = took[:, compute] > run.work.duration_ns[compute]
    assert (run.end_ns[:, compute] == run.dispatch_ns[:, compute])[stretched].all()


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
    floor = np.where(work.eager & ~work.is_send, 0, work.duration_ns)
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


@LAWS
@given(plan=plans(), prices=PRICES)
def test_more_steps_change_nothing_in_the_steps_before(plan, prices):
    short, long = (simulate(plan, prices, steps=steps) for steps in (2, 4))
    for few, many in zip(short.tracks, long.tracks, strict=True):
        kept = many.step < 2
        assert many.start_ns[kept].tolist() == few.start_ns.tolist()
        assert many.end_ns[kept].tolist() == few.end_ns.tolist()


@LAWS
@given(plan=plans(), prices=PRICES)
def test_the_same_plan_gives_the_same_rows_twice(plan, prices):
    assert simulate(plan, prices).rows() == simulate(plan, prices).rows()

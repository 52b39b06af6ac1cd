"""The critical path where links, processors and memory bandwidth are shared."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import build_workload, simulate
from simulator.insight import critical_path, slack_ns, slowed_on_path
from simulator.insight.network import alone_ns
from simulator.plan import TaskKind
from simulator.sharing import Sharing
from tests.plans import FakeCostModel, PlanBuilder
from tests.random_plans import PRICES, plans
from tests.random_sharing import random_sharing


@settings(max_examples=25, deadline=None)
@given(plan=plans(), prices=PRICES, seed=st.integers(0, 2**32), steps=st.integers(1, 2))
def test_under_sharing_the_path_still_has_no_gap_and_loses_what_its_parts_take_longer(
    *, plan, prices, seed, steps
):
    work = build_workload(plan, prices)
    work = replace(work, sharing=random_sharing(work, random.Random(seed)))
    timeline = simulate(plan, prices, steps=steps, workload=work)
    path = critical_path(work, timeline)
    assert [part.begin_ns for part in path.parts] == [0, *(p.end_ns for p in path.parts)][: len(path.parts)]
    assert sum(part.time_ns for part in path.parts) == timeline.makespan_ns
    assert (slack_ns(work, timeline) >= 0).all()
    for slow in slowed_on_path(plan, work, timeline, path=path):
        assert slow.lasted_ns > slow.alone_ns
        assert len(set(slow.over)) == len(slow.over)


def of_nothing(workload, **changes):
    """Return demands of which nothing is shared, but for `changes`."""
    rows = len(workload.prices.duration_ns)
    nothing = Sharing(
        latency_ns=np.zeros(rows, np.int64), growth=np.zeros(rows), link_starts=np.zeros(rows + 1, np.int64),
        links=np.zeros(0, np.int64), uses=np.zeros(0), link_names=(), memory=np.zeros(rows),
        processor_part=np.zeros(rows), memory_part=np.zeros(rows),
        processors=np.zeros(workload.num_tasks, np.int64),
        priority=np.zeros(workload.num_streams, np.int64), num_processors=10,
    )  # fmt: skip
    return replace(nothing, **changes)


@pytest.fixture
def overlapping():
    """A gather of 20 ns under a computation of 30 ns; then an update."""
    builder = PlanBuilder()
    device = builder.devices[0]
    bucket, group = device.bucket("d"), builder.group("dp0", "dp", [0])
    device.task("g", TaskKind.ALL_GATHER, "dp", group=group, bucket=bucket)
    device.compute("f", 30, TaskKind.F, microbatch=0)
    device.compute("u", 5, TaskKind.UPDATE)
    plan = builder.build()
    prices = FakeCostModel(collective_ns=lambda *_: 20)
    return plan, prices, build_workload(plan, prices)


def test_a_computation_beside_communication_that_holds_processors_says_so(overlapping):
    plan, prices, work = overlapping
    gather = work.codes.index(next(code for code in work.codes if "ALL_GATHER" in code))
    held = np.zeros(work.num_tasks, np.int64)
    held[gather] = 5
    bound = np.zeros(len(work.prices.duration_ns))
    bound[work.price[work.codes.index("0F0")]] = 1.0
    shared = replace(work, sharing=of_nothing(work, processors=held, processor_part=bound))
    timeline = simulate(plan, prices, steps=1, workload=shared)
    path = critical_path(shared, timeline)
    (slow,) = slowed_on_path(plan, shared, timeline, path=path)
    assert timeline.makespan_ns == 20 + 20 + 5
    assert (slow.kind, slow.alone_ns, slow.lasted_ns) == ("F", 30, 40)
    assert (slow.beside, slow.over) == (("exposed_dp",), ("processors",))


def test_without_sharing_nothing_is_slowed(overlapping):
    plan, prices, work = overlapping
    timeline = simulate(plan, prices, steps=1, workload=work)
    assert slowed_on_path(plan, work, timeline, path=critical_path(work, timeline)) == ()
    assert alone_ns(work, steps=1).tolist() == work.duration_ns.tolist()


def test_two_messages_over_one_link_name_each_other_and_the_link():
    builder = PlanBuilder(pipeline_ranks=3)
    builder.devices[0].compute("a", 1, microbatch=0)
    builder.devices[2].compute("c", 1, microbatch=0)
    builder.transfer(0, 1, sent_after=["a"], name="x")
    builder.transfer(2, 1, sent_after=["c"], name="y")
    builder.devices[1].compute("b", 5, microbatch=0, waits=["recv x", "recv y"])
    plan = builder.build()
    prices = FakeCostModel(transfer_ns=lambda *_: 8)
    work = build_workload(plan, prices)
    rows = sorted({int(work.price[task]) for task in np.flatnonzero(work.is_send)})
    starts = np.cumsum([0] + [int(row in rows) for row in range(len(work.prices.duration_ns))])
    growth = np.where(np.diff(starts) > 0, 1.0, 0.0)
    shared = replace(
        work,
        sharing=of_nothing(
            work, growth=growth, link_starts=starts, links=np.zeros(len(rows), np.int64),
            uses=np.ones(len(rows)), link_names=("port into rank 1",),
        ),
    )  # fmt: skip
    timeline = simulate(plan, prices, steps=1, workload=shared)
    (slow,) = slowed_on_path(plan, shared, timeline, path=critical_path(shared, timeline))
    assert timeline.makespan_ns == 1 + 16 + 5
    assert (slow.kind, slow.alone_ns, slow.lasted_ns) == ("exposed_pp", 8, 16)
    assert (slow.beside, slow.over) == (("exposed_pp",), ("port into rank 1",))

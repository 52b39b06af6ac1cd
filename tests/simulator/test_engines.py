"""Every engine gives the answer of the reference, to the nanosecond: all times, or who is blocked."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.catalogue import TASKS
from piper.schedules import SCHEDULES, copies_of, find_schedule, layout_of
from piper.schedules.minimal_plan import preview_plan
from piper.schedules.rows import stages_by_rank
from simulator import build_workload, simulate
from simulator.engines import ENGINES, MANY_TASKS, EngineRun, choose_engine, load_engine
from simulator.errors import IllegalPlanError
from simulator.plan import IndexLists, Plan
from simulator.simulation import has_settled
from simulator.workload import Workload
from tests.piper.schedules.oracles import rows_or_none
from tests.plans import Costs, FakeCostModel, PlanBuilder, exact_price, one_f_one_b_rows, pipeline_plan
from tests.random_plans import PRICES, plans
from tests.random_sharing import random_sharing
from tests.strategies import compile_drawn, drawn

OTHERS = [name for name in ENGINES if name != "reference"]
COLUMNS = ("dispatch_ns", "ready_ns", "start_ns", "end_ns", "step_end_ns")
SEEDS = [
    *range(180),
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(180, 2000)),
]
GRID = [
    pytest.param(name, p, marks=() if (name, p) in {("1f1b", 4), ("zbv", 2)} else pytest.mark.slow)
    for name in SCHEDULES
    for p in (2, 4, 8)
]


class RandomPrices(FakeCostModel):
    """Few and small times, so that many things happen at one nanosecond."""

    def __init__(self, seed: int) -> None:
        choose = random.Random(seed)
        limit = choose.choice([0, 100, 10**9])
        per_kind = cache(lambda *_: choose.randrange(9))
        super().__init__(
            launch_ns=choose.choice([0, 0, 1, 3]),
            run_ahead_kernels=choose.choice([None, None, 1, 2, 5]),
            blocking=tuple(choose.sample(TASKS, choose.choice([0, 0, 0, 2]))),
            eager_limit_bytes=limit,
            transfer_ns=per_kind,
            collective_ns=lambda kind, size, ranks: per_kind(kind, size),
            host_copy_ns=per_kind,
        )
        self.per_operation = cache(lambda operation: choose.randrange(9))

    def operation(self, operation):
        return exact_price(self.per_operation(operation))


def outcome(engine: str, workload: Workload, *, steps: int | str) -> EngineRun | tuple[str, ...]:
    """Return what an engine says: the times, or the sentences on a hang."""
    most, settled = (4, has_settled) if steps == "auto" else (steps, lambda _: False)
    try:
        return load_engine(engine)(workload, max_steps=most, settled=settled)
    except IllegalPlanError as error:
        return error.violations


def require_equal(workload: Workload, *, steps: int | str) -> None:
    expected = outcome("reference", workload, steps=steps)
    for name in OTHERS:
        found = outcome(name, workload, steps=steps)
        if isinstance(expected, tuple) or isinstance(found, tuple):
            assert found == expected
            continue
        for column in COLUMNS:
            np.testing.assert_array_equal(getattr(found, column), getattr(expected, column), column)


def shared(work: Workload, choose: random.Random) -> Workload:
    """Return the workload where things are shared, sometimes with durations that differ from step to step."""
    noisy = None
    if choose.random() < 0.3:
        noise = [[choose.randint(-3, 3) for _ in range(work.num_tasks)] for _ in range(2)]
        noisy = np.maximum(work.duration_ns + np.array(noise, dtype=np.int64).reshape(2, -1), 0)
    longer = work.duration_ns * choose.choice([1, 7, 1000])
    return replace(work, duration_ns=longer, noisy_ns=noisy, sharing=random_sharing(work, choose))


STEPS = st.sampled_from([1, 2, 3, "auto"])


@settings(max_examples=130, deadline=None)
@given(plan=plans(), prices=PRICES, steps=STEPS)
def test_engines_agree_on_random_plans(plan: Plan, prices: FakeCostModel, steps: int | str) -> None:
    require_equal(build_workload(plan, prices), steps=steps)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(plan=plans(), prices=PRICES, steps=STEPS)
def test_engines_agree_on_many_random_plans(plan: Plan, prices: FakeCostModel, steps: int | str) -> None:
    require_equal(build_workload(plan, prices), steps=steps)


@pytest.mark.parametrize("seed", SEEDS)
def test_engines_agree_on_a_random_strategy(seed: int) -> None:
    workload = build_workload(compile_drawn(drawn(seed), verified=False), RandomPrices(seed))
    choose = random.Random(seed)
    require_equal(workload, steps=choose.choice([1, 2, 3, "auto"]))
    require_equal(shared(workload, choose), steps=choose.choice([1, 2, 3, "auto"]))


RANDOM = st.randoms(use_true_random=False)


@settings(max_examples=130, deadline=None)
@given(plan=plans(), prices=PRICES, steps=STEPS, choose=RANDOM)
def test_engines_agree_on_random_plans_where_things_are_shared(
    plan: Plan, prices: FakeCostModel, steps: int | str, choose: random.Random
) -> None:
    require_equal(shared(build_workload(plan, prices), choose), steps=steps)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(plan=plans(), prices=PRICES, steps=STEPS, choose=RANDOM)
def test_engines_agree_on_many_random_plans_where_things_are_shared(
    plan: Plan, prices: FakeCostModel, steps: int | str, choose: random.Random
) -> None:
    require_equal(shared(build_workload(plan, prices), choose), steps=steps)


@pytest.mark.parametrize(("name", "ranks"), GRID)
def test_engines_agree_on_a_schedule(name: str, ranks: int) -> None:
    function = find_schedule(name)
    for held in (1, 2, 4):
        for microbatches in range(ranks, 4 * ranks + 1):
            rows = rows_or_none(name, ranks, microbatches, held)
            if rows is None:
                continue
            plan = preview_plan(
                rows,
                stages=stages_by_rank(ranks, held, layout=layout_of(function)),
                durations_ns={"F": 3, "B": 6, "BI": 4, "BW": 2, "FB": 8, "comm": 1},
                copies=copies_of(function),
                where="here",
            )
            workload = build_workload(plan, RandomPrices(microbatches))
            require_equal(workload, steps="auto")
            require_equal(shared(workload, random.Random(microbatches)), steps="auto")


@settings(max_examples=60, deadline=None)
@given(
    plan=plans(),
    prices=PRICES,
    steps=STEPS,
    choose=st.randoms(use_true_random=False),
    share=st.sampled_from([0.0, 0.02, 0.1]),
)
def test_engines_agree_on_who_waits_for_whom_in_plans_that_may_hang(
    plan: Plan, prices: FakeCostModel, steps: int | str, choose: random.Random, share: float
) -> None:
    """Waits for any task of the device, in this step and the one before, and streams in another order."""
    work = build_workload(plan, prices)
    tasks = range(work.num_tasks)
    devices = [work.device_of(task) for task in tasks]
    same = [[other for other in tasks if devices[other] == devices[task]] for task in tasks]

    def with_more(lists: IndexLists, share: float) -> IndexLists:
        more = [[choose.choice(same[task])] if choose.random() < share else [] for task in tasks]
        return IndexLists.from_rows([row + new for row, new in zip(lists.to_rows(), more, strict=True)])

    streams = work.stream.copy()
    for task in tasks:
        if choose.random() < share:
            first, last = work.stream_starts[devices[task] : devices[task] + 2].tolist()
            streams[task] = choose.randrange(first, last)
    changed = replace(
        work,
        waits=with_more(work.waits, share),
        previous_step_waits=with_more(work.previous_step_waits, 0.3),
        stream=streams,
        host_waits=with_more(work.host_waits, share / 2),
    )
    require_equal(changed, steps=steps)
    require_equal(shared(changed, choose), steps=steps)


@pytest.mark.parametrize("engine", OTHERS)
def test_a_hang_is_reported_in_the_same_words(engine: str) -> None:
    builder = PlanBuilder(pipeline_ranks=2)
    builder.devices[0].compute("a", 1, microbatch=0)
    builder.devices[0].compute("b", 1, microbatch=1)
    builder.devices[0].wait_later("a", for_whom="b")
    builder.devices[1].compute("c", 1, microbatch=0)
    with pytest.raises(IllegalPlanError) as caught:
        simulate(builder.build(), FakeCostModel(), engine=engine)
    assert caught.value.where == "simulate: the plan hangs"
    assert caught.value.violations == (
        "0F0 of pipeline rank 0 waits for 0F1 of pipeline rank 0 (queued behind 0F0 of pipeline rank 0)",
    )


@pytest.mark.parametrize("engine", OTHERS)
def test_a_column_that_cannot_be_written_or_is_no_array_in_a_row_is_taken_as_well(engine: str) -> None:
    work = build_workload(pipeline_plan(one_f_one_b_rows(3, 4)), FakeCostModel(transfer_ns=lambda *_: 2))
    spread = np.repeat(work.duration_ns, 2)[::2]
    starts = work.waits.starts.copy()
    starts.flags.writeable = False
    changed = replace(work, duration_ns=spread, waits=IndexLists(starts=starts, values=work.waits.values))
    require_equal(changed, steps=2)


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=25, deadline=None)
@given(plan=plans(), prices=PRICES, faster=st.fixed_dictionaries({"transfer": st.integers(0, 3)}))
def test_a_faster_link_or_a_shorter_launch_never_slows_a_plan(
    engine: str, plan: Plan, prices: FakeCostModel, faster: dict[str, int]
) -> None:
    before = simulate(plan, prices, steps=2, engine=engine).makespan_ns
    link = replace(
        prices,
        transfer_ns=lambda *where: max(prices.transfer_ns(*where) - faster["transfer"], 0),
        collective_ns=lambda *what: max(prices.collective_ns(*what) - faster["transfer"], 0),
    )
    assert simulate(plan, link, steps=2, engine=engine).makespan_ns <= before
    host = replace(prices, launch_ns=max(prices.launch_ns - 1, 0))
    assert simulate(plan, host, steps=2, engine=engine).makespan_ns <= before


@pytest.mark.parametrize("engine", OTHERS)
def test_a_long_plan_gives_the_same_timeline_and_memory(engine: str) -> None:
    plan = pipeline_plan(
        one_f_one_b_rows(4, 40), costs=Costs(forward_ns=5, backward_ns=9, update_ns=2), replicas=2, clip=True
    )
    prices = FakeCostModel(launch_ns=1, transfer_ns=lambda *_: 3, collective_ns=lambda *_: 4)
    expected, found = (simulate(plan, prices, engine=name) for name in ("reference", engine))
    assert found.rows() == expected.rows()
    for ours, theirs in zip(found.tracks, expected.tracks, strict=True):
        assert ours.memory_ns.tolist() == theirs.memory_ns.tolist()
        assert ours.memory_bytes.tolist() == theirs.memory_bytes.tolist()


def test_auto_takes_the_fast_engine_for_many_tasks_or_where_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "simulator.engines.fast", raising=False)
    assert choose_engine("auto", num_tasks=MANY_TASKS - 1) == ("reference", ())
    assert choose_engine("auto", num_tasks=MANY_TASKS) == ("fast", ())
    monkeypatch.setitem(sys.modules, "simulator.engines.fast", sys)
    assert choose_engine("auto", num_tasks=1) == ("fast", ())
    assert choose_engine("reference", num_tasks=MANY_TASKS) == ("reference", ())


def test_without_numba_the_reference_engine_does_the_work_and_a_notice_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    plan = pipeline_plan(one_f_one_b_rows(2, 3))
    timeline = simulate(plan, FakeCostModel(), engine="fast")
    assert timeline.rows() == simulate(plan, FakeCostModel(), engine="reference").rows()
    (notice,) = timeline.warnings
    assert "the fast engine needs numba, which cannot be imported" in notice
    assert "the reference engine gives the same answer" in notice
    assert simulate(plan, FakeCostModel(), engine="reference").warnings == ()

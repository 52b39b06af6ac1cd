from __future__ import annotations

import subprocess
import sys

import pytest

import simulator
from simulator import simulate
from simulator.engines import ENGINES
from simulator.errors import PlanError
from simulator.plan import TaskKind
from simulator.simulation import has_settled
from tests.plans import FakeCostModel, PlanBuilder, one_f_one_b_rows, pipeline_plan

K = TaskKind


def test_steps_auto_stops_as_soon_as_two_periods_agree():
    timeline = simulate(pipeline_plan(one_f_one_b_rows(4, 8)), FakeCostModel())
    assert timeline.num_steps == 2
    assert timeline.warnings == ()
    assert timeline.step_time_ns * 2 == timeline.makespan_ns


def test_steps_auto_looks_beyond_a_first_step_that_only_waits_for_the_host():
    builder = PlanBuilder()
    builder.devices[0].compute("f", 100, microbatch=0)
    timeline = simulate(builder.build(), FakeCostModel(launch_ns=30))
    assert timeline.step_end_ns.tolist() == [130, 230, 330]
    assert timeline.step_time_ns == 100
    assert timeline.window_ns == (230, 330)


def test_steps_that_do_not_settle_end_after_four_with_a_warning():
    builder = PlanBuilder()
    device = builder.devices[0]
    bucket, group = device.bucket("d"), builder.group("dp0", "dp", [0])

    def reduce(name, size, **waits):
        device.task(name, K.ALL_REDUCE, name, group=group, bucket=bucket, size_bytes=size, **waits)

    device.compute("x", 1, microbatch=0, previous_step_waits=["w"])
    for name, after in (("z1", "x"), ("z2", "z1"), ("z3", "z2")):
        reduce(name, 3, waits=[after])
    reduce("y", 1, previous_step_waits=["z3"])
    reduce("w", 1, waits=["y"])
    timeline = simulate(builder.build(), FakeCostModel(collective_ns=lambda kind, size, ranks: size))
    assert timeline.step_end_ns.tolist() == [10, 13, 22, 25]
    assert timeline.step_time_ns == 3
    (warning,) = timeline.warnings
    assert warning.startswith(
        "the step time had not settled after 4 steps (1e-08 s, 3e-09 s, 9e-09 s, 3e-09 s)"
    )


def test_periods_agree_to_one_part_in_a_million():
    assert has_settled([100, 200])
    assert not has_settled([100])
    assert not has_settled([10, 30, 60, 100])
    assert has_settled([0, 10**9, 2 * 10**9 + 900])
    assert not has_settled([0, 10**9, 2 * 10**9 + 2000])


def test_one_isolated_step_has_its_makespan_as_step_time():
    timeline = simulate(pipeline_plan(one_f_one_b_rows(2, 2)), FakeCostModel(), steps=1)
    assert timeline.num_steps == 1
    assert timeline.step_time_ns == timeline.makespan_ns == 6


@pytest.mark.parametrize("steps", [0, -1, True, 1.5, "two"])
def test_a_number_of_steps_that_is_none_is_refused(steps):
    with pytest.raises(PlanError) as caught:
        simulate(pipeline_plan(one_f_one_b_rows(2, 2)), FakeCostModel(), steps=steps)
    assert caught.value.field == "steps"
    assert '"auto"' in caught.value.fix


def test_an_unknown_engine_gets_a_did_you_mean():
    with pytest.raises(PlanError) as caught:
        simulate(pipeline_plan(one_f_one_b_rows(2, 2)), FakeCostModel(), engine="refrence")
    assert caught.value.field == "engine"
    assert caught.value.fix == "did you mean 'reference'?"


@pytest.mark.parametrize("name", ["auto", *ENGINES])
def test_every_listed_engine_can_be_loaded_and_gives_the_rows_of_the_reference(name):
    plan = pipeline_plan(one_f_one_b_rows(3, 5), replicas=2, clip=True)
    model = FakeCostModel(launch_ns=2, transfer_ns=lambda *_: 3, collective_ns=lambda *_: 4)
    reference = simulate(plan, model, engine="reference")
    assert simulate(plan, model, engine=name).rows() == reference.rows()


def test_a_track_says_who_it_stands_for():
    timeline = simulate(pipeline_plan(one_f_one_b_rows(2, 2), replicas=4), FakeCostModel(), steps=1)
    assert [(t.rank, t.n_devices, t.pipeline_rank, t.stages) for t in timeline.tracks] == [
        (0, 4, 0, (0,)),
        (4, 4, 1, (1,)),
    ]


def test_public_names_resolve_and_an_unknown_one_is_an_attribute_error():
    assert all(getattr(simulator, name) is not None for name in simulator.__all__)
    assert set(simulator.__all__) <= set(dir(simulator))
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = simulator.simulat


def test_importing_the_simulator_and_its_public_names_loads_neither_torch_nor_piper():
    program = (
        "import simulator, cost_models, sys\n"
        "[getattr(simulator, name) for name in simulator.__all__]\n"
        "import simulator.engines.reference, simulator.timeline.plots, simulator.timeline.chrome\n"
        "print([m for m in ('torch', 'piper', 'numba', 'pandas', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""Random jitter for random plans, and the comparison of unfolded runs with the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from simulator import build_workload
from simulator.engines import load_engine
from simulator.errors import IllegalPlanError
from simulator.jitter import Disturbance, parse_jitter, resolve
from simulator.jitter.run import run_unfolded, template_of
from simulator.jitter.unfold import run_explicitly
from simulator.jitter.unfolded_run import UnfoldedRun
from simulator.jitter.units import folded, unfolded
from simulator.plan import Plan
from simulator.workload import Workload

GPUS_PER_NODE = 2
COLUMNS = ("dispatch_ns", "ready_ns", "start_ns", "end_ns")
SPECS = [
    "straggler:rank=0,factor=1.3",
    "noise:sigma=0.5",
    "noise:sigma=0.3,on=all",
    "noise:sigma=0.4,per=rank,on=all; straggler:rank=0,factor=2.5; straggler:rank=0,factor=0.9",
    "link:rank=0,factor=0.3",
    "slow-node:node=0,factor=1.7; noise:sigma=0.2",
    "hiccup:probability=0.3,ms=0.00001",
    "hiccup:probability=0.5,ms=0.00002,rank=0; link:node=0,factor=0.5; noise:sigma=0.3,on=communication",
]
JITTERS = st.sampled_from(SPECS)


def disturbance_of(spec: str, plan: Plan) -> Disturbance:
    return resolve(parse_jitter(spec) if spec else (), plan, gpus_per_node=GPUS_PER_NODE)


def require_equal_to_the_oracle(plan: Plan, workload: Workload, **options) -> None:
    """Compare the kernel, with a unit per rank and with as few as can be, with the explicit unfolding."""
    spec, engine = options.pop("spec"), load_engine(options.pop("engine", "reference"))
    disturbance = disturbance_of(spec, plan)
    every = unfolded(plan, disturbance)
    template = template_of(plan, workload)
    try:
        oracle = run_explicitly(plan, workload, every, disturbance=disturbance, engine=engine, **options)
    except IllegalPlanError:
        with pytest.raises(IllegalPlanError):
            run_unfolded(template, every, disturbance, **options)
        return
    for units in (every, folded(plan, disturbance)):
        record = list(range(units.num_units))
        found = run_unfolded(template, units, disturbance, record=record, **options)
        require_same(found, oracle)


def require_same(found: UnfoldedRun, oracle: UnfoldedRun) -> None:
    """Compare what every rank did; `oracle` has a unit for each."""
    of_rank = found.units.of_rank
    np.testing.assert_array_equal(found.step_end_ns, oracle.step_end_ns)
    for name in ("unit_end_ns", "waited_ns", "caused_ns"):
        np.testing.assert_array_equal(getattr(found, name)[:, of_rank], getattr(oracle, name), name)
    for rank, unit in enumerate(of_rank.tolist()):
        for name in COLUMNS:
            ours, theirs = (getattr(run, name) for run in (found.recorded[unit], oracle.recorded[rank]))
            np.testing.assert_array_equal(ours, theirs, f"{name} of rank {rank}")


def step_ns(plan: Plan, prices, spec: str, *, seed: int = 0, steps: int = 1) -> list[int]:
    """Return when each step ends on the last rank."""
    disturbance = disturbance_of(spec, plan)
    template = template_of(plan, build_workload(plan, prices))
    units = folded(plan, disturbance)
    return run_unfolded(template, units, disturbance, seed=seed, max_steps=steps).step_end_ns.tolist()

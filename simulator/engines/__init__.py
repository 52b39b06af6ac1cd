"""Engines by name: what happens, and when, if a workload runs.

To add an engine: make a folder `simulator/engines/<name>/` whose `run` has the signature of `Engine` and
uses the functions of `simulator.rules`, and add one line below. `tests/simulator/test_engines.py` then
holds it to the reference, to the nanosecond. Entries are "module:name" strings, so that listing engines
imports none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cost_models.errors import require_known
from simulator.errors import PlanError
from simulator.workload import Workload

ENGINES = {
    "fast": "simulator.engines.fast:run",
    "reference": "simulator.engines.reference:run",
}

NEEDS = {"fast": "numba"}
"""What an engine cannot do without, by its name."""
MANY_TASKS = 20_000
"""Tasks of a step from which on loading the fast engine pays (`benchmarks/engine_speed.py`)."""

Settled = Callable[[Sequence[int]], bool]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineRun:
    """When each task ran; columns are int64 [steps, tasks], meanings as in `RankTrack`."""

    dispatch_ns: npt.NDArray[np.int64]
    ready_ns: npt.NDArray[np.int64]
    start_ns: npt.NDArray[np.int64]
    end_ns: npt.NDArray[np.int64]
    step_end_ns: npt.NDArray[np.int64]

    def tasks(self, first: int, last: int) -> EngineRun:
        """Return the times of tasks `first` to `last` - 1."""
        return EngineRun(
            dispatch_ns=self.dispatch_ns[:, first:last],
            ready_ns=self.ready_ns[:, first:last],
            start_ns=self.start_ns[:, first:last],
            end_ns=self.end_ns[:, first:last],
            step_end_ns=self.step_end_ns,
        )


class Engine(Protocol):
    """Run `workload` again and again until `settled(ends of the steps so far)`, at most `max_steps` times.

    A step's times do not depend on later steps, so stopping early changes nothing before the stop.
    Raises: IllegalPlanError if the plan hangs, naming the blocked tasks and whom they wait for.
    """

    def __call__(self, workload: Workload, *, max_steps: int, settled: Settled) -> EngineRun:
        """Return the times of all tasks of the steps that were run."""


def choose_engine(name: str, *, num_tasks: int) -> tuple[str, tuple[str, ...]]:
    """Return the engine to load, and what its user should know: that another one has to do the work.

    "auto" is the fast engine for many tasks, or where it is loaded already: loading it takes half a second.
    Raises: PlanError for a name that is not known.
    """
    require_known(name, ["auto", *ENGINES], where="simulate", field="engine", error=PlanError)
    if name == "auto":
        fast = num_tasks >= MANY_TASKS or ENGINES["fast"].partition(":")[0] in sys.modules
        name = "fast" if fast else "reference"
    if name not in NEEDS:
        return name, ()
    try:
        import_module(NEEDS[name])
    except ImportError as error:
        return "reference", (
            f"the {name} engine needs {NEEDS[name]}, which cannot be imported ({error}): "
            "the reference engine gives the same answer, but takes longer",
        )
    return name, ()


def load_engine(name: str) -> Engine:
    """Import an engine of the table."""
    module, function = ENGINES[name].split(":")
    engine: Engine = getattr(import_module(module), function)
    return engine

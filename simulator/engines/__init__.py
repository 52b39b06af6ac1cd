"""Engines by name: what happens, and when, if a workload runs.

To add an engine: make a folder `simulator/engines/<name>/` whose `run` has the signature of `Engine` and
uses the functions of `simulator.rules`, and add one line below. `tests/simulator/test_engines.py` then
holds it to the reference, to the nanosecond. Entries are "module:name" strings, so that listing engines
imports none of them.
"""

from __future__ import annotations

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
    "reference": "simulator.engines.reference:run",
}

Settled = Callable[[Sequence[int]], bool]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineRun:
    """When each task ran; columns are int64 [steps, tasks], meanings as in `RankTrack`."""

    dispatch_ns: npt.NDArray[np.int64]
    ready_ns: npt.NDArray[np.int64]
    start_ns: npt.NDArray[np.int64]
    end_ns: npt.NDArray[np.int64]
    step_end_ns: npt.NDArray[np.int64]


class Engine(Protocol):
    """Run `workload` again and again until `settled(ends of the steps so far)`, at most `max_steps` times.

    A step's times do not depend on later steps, so stopping early changes nothing before the stop.
    Raises: IllegalPlanError if the plan hangs, naming the blocked tasks and whom they wait for.
    """

    def __call__(self, workload: Workload, *, max_steps: int, settled: Settled) -> EngineRun:
        """Return the times of all tasks of the steps that were run."""


def load_engine(name: str) -> Engine:
    """Import an engine; "auto" takes the reference engine."""
    known = ["auto", *ENGINES]
    require_known(name, known, where="simulate", field="engine", error=PlanError)
    module, function = ENGINES["reference" if name == "auto" else name].split(":")
    engine: Engine = getattr(import_module(module), function)
    return engine

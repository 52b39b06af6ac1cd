"""`UnfoldedRun`: what came out of a run in which every unit has its own times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simulator.engines import EngineRun
from simulator.jitter.units import Units

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnfoldedRun:
    """Ends and waits by step and unit; see [Note: blame] of `simulator.jitter.kernel`.

    Args:
        units: who they are.
        step_end_ns: int64 [steps], when the last unit finished each step.
        unit_end_ns: int64 [steps, units].
        waited_ns: int64 [steps, units], how long a rank of the unit was joined before the last arrival.
        caused_ns: int64 [steps, units], how long others waited for a rank of the unit as the last arrival.
        recorded: times of the tasks of some units, columns int64 [steps, tasks of its device plan].
    """

    units: Units
    step_end_ns: Ints
    unit_end_ns: Ints
    waited_ns: Ints
    caused_ns: Ints
    recorded: Mapping[int, EngineRun]

    @property
    def period_ns(self) -> Ints:
        """Return the time between consecutive step ends, int64 [steps]; the first begins at 0."""
        return np.diff(self.step_end_ns, prepend=0)

"""What each rank is doing right now, in memory that the launcher can read. Free of torch.

Writers are the ranks, each its own row; the launcher only reads, so no lock is needed.
"""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from simulator.plan import NONE

_COLUMNS = 5


class Phase(IntEnum):
    """What a rank does."""

    STARTING = 0
    RUNNING = 1  # in a task of its own
    WAITING = 2  # for a task of another stream, hence for another rank
    MEETING = 3  # in a barrier or gathering with all ranks
    VERIFYING = 4  # computing the reference
    DONE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One rank's last report.

    Args:
        phase: what it does.
        step, position: task that it runs or wants to run (dispatch position), or NONE.
        waits_for: dispatch position of the task that it waits for, or NONE.
        since_ns: `time.monotonic_ns` of the report.
    """

    phase: Phase
    step: int
    position: int
    waits_for: int
    since_ns: int


class ProgressBoard:
    """A table [ranks, columns] shared by a launcher and the processes it forks."""

    def __init__(self, num_ranks: int) -> None:
        memory = mmap.mmap(-1, num_ranks * _COLUMNS * np.dtype(np.int64).itemsize)
        self._table: npt.NDArray[np.int64] = np.frombuffer(memory, dtype=np.int64).reshape(num_ranks, -1)
        for rank in range(num_ranks):
            self.report(rank, Phase.STARTING)

    def report(
        self, rank: int, phase: Phase, *, step: int = NONE, position: int = NONE, waits_for: int = NONE
    ) -> None:
        """Write the row of a rank."""
        self._table[rank] = (phase, step, position, waits_for, time.monotonic_ns())

    def standing(self, rank: int) -> Standing:
        """Read the row of a rank."""
        phase, step, position, waits_for, since_ns = self._table[rank].tolist()
        return Standing(
            phase=Phase(phase), step=step, position=position, waits_for=waits_for, since_ns=since_ns
        )

"""What each rank is doing right now, in memory that the launcher can read. Free of torch.

Writers are the ranks, each its own row, so no lock is needed; the launcher writes a row of its own.

[Note: the last step]
Who interrupts a run wants the steps that were trained, and ranks can only end after the same one. So the
launcher first closes the gate, then reads which steps have begun, and names the furthest of them as the last.
A rank says which step it is about to begin before it looks at the gate: either the launcher has seen it, or
it sees the closed gate and waits for the name.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from simulator.plan import NONE

_COLUMNS = 6
_BEGUN = 5
"""Column: the step that a rank has begun or is about to begin."""
_OPEN, _CLOSED = -2, -3
"""In the launcher's row, instead of the last step: there is none; it is about to be named."""
_LOOK_S = 1e-3


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


Report = Callable[..., None]
"""`ProgressBoard.report` for one rank: (phase, step=, position=, waits_for=)."""


def _tell_nobody(*_: object, **__: object) -> None:
    return


def _always(_step: int) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """A rank's ways to its launcher; by default there is none.

    Args:
        report: says what the rank does.
        may_begin: says which step it is about to begin, and returns whether it may.
    """

    report: Report = _tell_nobody
    may_begin: Callable[[int], bool] = _always


class ProgressBoard:
    """A table [ranks, columns] shared by a launcher and the processes it forks."""

    def __init__(self, num_ranks: int) -> None:
        memory = mmap.mmap(-1, (num_ranks + 1) * _COLUMNS * np.dtype(np.int64).itemsize)
        self._table: npt.NDArray[np.int64] = np.frombuffer(memory, dtype=np.int64).reshape(num_ranks + 1, -1)
        self._table[:, _BEGUN] = NONE
        self._table[-1] = _OPEN
        for rank in range(num_ranks):
            self.report(rank, Phase.STARTING)

    def report(
        self, rank: int, phase: Phase, *, step: int = NONE, position: int = NONE, waits_for: int = NONE
    ) -> None:
        """Write the row of a rank."""
        self._table[rank, :_BEGUN] = (phase, step, position, waits_for, time.monotonic_ns())

    def begins(self, rank: int, step: int) -> bool:
        """Say that a rank is about to begin a step; return whether it may [Note: the last step]."""
        self._table[rank, _BEGUN] = step
        while (last := int(self._table[-1, 0])) == _CLOSED:
            time.sleep(_LOOK_S)
        return last == _OPEN or step <= last

    def close(self) -> None:
        """Let no rank begin a step until the last one is named."""
        self._table[-1, 0] = _CLOSED

    def name_last_step(self) -> bool:
        """Let the ranks end after the furthest step that one has begun; return False where none has."""
        last = int(self._table[:-1, _BEGUN].max())
        self._table[-1, 0] = last
        return last != NONE

    def standing(self, rank: int) -> Standing:
        """Read the row of a rank."""
        phase, step, position, waits_for, since_ns = self._table[rank, :_BEGUN].tolist()
        return Standing(
            phase=Phase(phase), step=step, position=position, waits_for=waits_for, since_ns=since_ns
        )

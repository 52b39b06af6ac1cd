"""Which task drives a communication: the sender, the first member of a collective, a copy itself."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from simulator.plan import NONE, IndexLists

Ints = npt.NDArray[np.int64]


class Meetings(Protocol):
    """Who meets whom: what a `Matching` and a `Workload` know alike."""

    @property
    def is_send(self) -> npt.NDArray[np.bool_]:
        """Bool [tasks]."""

    @property
    def partner(self) -> Ints:
        """int64 [tasks], the other end of a transfer, or NONE."""

    @property
    def collective(self) -> Ints:
        """int64 [tasks], number of the collective, or NONE."""

    @property
    def members(self) -> IndexLists:
        """Task numbers by collective."""


def driving_stream(matching: Meetings, *, stream: Ints, is_compute: npt.NDArray[np.bool_]) -> Ints:
    """Return by task the stream of the task that drives its communication; computations: NONE.

    Args:
        matching: who meets whom.
        stream: int64 [tasks].
        is_compute: bool [tasks].
    """
    alone = matching.is_send | (matching.partner == NONE)
    driver = stream[np.where(alone, np.arange(len(stream)), matching.partner)]
    if len(matching.members.values):
        first = matching.members.values[matching.members.starts[:-1]]
        joins = matching.collective != NONE
        driver = np.where(joins, stream[first[np.where(joins, matching.collective, 0)]], driver)
    return np.where(is_compute, NONE, driver)

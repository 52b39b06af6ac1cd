"""Max-min fair speeds of flows over shared links; compiled unchanged by the fast engine.

[Note: max-min fairness]  All flows raise the share of their busiest link that they hold alike, until they run
    at full speed or a link on their way is full; the others go on (progressive filling: Bertsekas and
    Gallager, Data Networks, 1992, section 6.5). Only links whose flows could together
    take more than there is are given to `fair_speeds`; no other one can be full.
[Note: sums from scratch]  Each round adds up every link anew, in the order of the flows. So the speeds of
    flows that share no link, even through others, do not depend on each other to the last bit, and an engine
    may fill them together or apart.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_LEAST = 1e-9
"""What a full link still gives: rounding leaves no flow without any speed."""


def fair_speeds(  # noqa: C901, PLR0912, PLR0917 (compiled: arrays one by one, inner loops)
    starts: Ints, links: Ints, uses: Floats, growth: Floats, used: Floats, grown: Floats, speeds: Floats
) -> None:
    """Write the speed of every flow, in (0, 1], to `speeds`; see [Note: max-min fairness].

    Args:
        starts: int64 [flows + 1], the entries of each flow in `links` and `uses`.
        links: int64 [entries], numbers of links.
        uses: float64 [entries], fraction of the link that the flow takes at full speed.
        growth: float64 [flows], how its speed grows: one over the fraction that it takes of its busiest link.
        used, grown: float64 [links], room for sums.
        speeds: float64 [flows], written.
    """
    waiting = len(growth)
    for flow in range(len(growth)):
        speeds[flow] = -1.0
    while waiting > 0:
        for link in range(len(used)):
            used[link] = 0.0
            grown[link] = 0.0
        level = np.inf
        for flow in range(len(growth)):
            goes_on = speeds[flow] < 0.0
            for entry in range(starts[flow], starts[flow + 1]):
                if goes_on:
                    grown[links[entry]] += uses[entry] * growth[flow]
                else:
                    used[links[entry]] += uses[entry] * speeds[flow]
            if goes_on:
                level = min(level, 1.0 / growth[flow])
        full_at = used
        for link in range(len(used)):
            full_at[link] = max(1.0 - used[link], _LEAST) / grown[link] if grown[link] > 0.0 else np.inf
            level = min(level, full_at[link])
        for flow in range(len(growth)):
            stops_at = 1.0 / growth[flow]
            for entry in range(starts[flow], starts[flow + 1]):
                stops_at = min(stops_at, full_at[links[entry]])
            if speeds[flow] < 0.0 and stops_at <= level:
                speeds[flow] = 1.0 if 1.0 / growth[flow] <= level else level * growth[flow]
                waiting -= 1

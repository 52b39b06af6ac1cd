"""Which counts each schedule takes, as rules on whole columns; `tests` compare them with the schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRule:
    """What a schedule needs, and what it does to the passes.

    Args:
        takes: (pipeline ranks, microbatches) -> whether it has rows for them.
        stages: virtual stages per rank: "one", "two", "several", or "any".
        layout: how stages lie on the ranks: "loop", "v" or "bidirectional".
        splits: whether backwards are cut in two halves.
        overlaps: whether slots hold a forward and a backward.
    """

    takes: Callable[[Ints, Ints], Bools] = lambda p, m: np.ones(np.broadcast(p, m).shape, dtype=np.bool_)
    stages: str = "one"
    layout: str = "loop"
    splits: bool = False
    overlaps: bool = False

    def takes_stages(self, vp: Ints) -> Bools:
        """Return whether each number of virtual stages per rank is right."""
        wanted = {"one": vp == 1, "two": vp == 2, "several": vp >= 2, "any": vp >= 1}  # noqa: PLR2004 (a V has two)
        return np.asarray(wanted[self.stages])


def _in_rounds(p: Ints, m: Ints) -> Bools:
    """Return whether rounds are of equal size (`piper.schedules.alternating`, [Note: rounds])."""
    return np.asarray(m % np.maximum(1, m // p) == 0)


def _in_pairs(p: Ints, m: Ints) -> Bools:
    return np.asarray((p % 2 == 0) & (m % 2 == 0) & (m >= 2 * p))


def _twice(p: Ints, m: Ints) -> Bools:
    return np.asarray(m >= 2 * p)


RULES: dict[str, ScheduleRule] = {
    "1f1b": ScheduleRule(),
    "gpipe": ScheduleRule(),
    "interleaved_1f1b": ScheduleRule(takes=_in_rounds, stages="several"),
    "looped_bfs": ScheduleRule(stages="several"),
    "interleaved_zb": ScheduleRule(takes=_in_rounds, stages="several", splits=True),
    "zb_h1": ScheduleRule(splits=True),
    "zb_h2": ScheduleRule(splits=True),
    "zb_1p": ScheduleRule(splits=True),
    "zb_2p": ScheduleRule(splits=True),
    "zbv": ScheduleRule(stages="two", layout="v", splits=True),
    "v_half": ScheduleRule(stages="two", layout="v", splits=True),
    "v_min": ScheduleRule(stages="two", layout="v", splits=True),
    "dualpipe": ScheduleRule(
        takes=_in_pairs, stages="two", layout="bidirectional", splits=True, overlaps=True
    ),
    "synthesized": ScheduleRule(stages="any", splits=True),
    "synthesized_v": ScheduleRule(stages="two", layout="v", splits=True),
    "dualpipe_v": ScheduleRule(takes=_twice, stages="two", layout="v", splits=True, overlaps=True),
}

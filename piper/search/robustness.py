"""Whether the winner of a search stays the best if the hardware is not quite what its files say.

[Note: hardware error]
Rates of kernels (matrix products, attention, all others) and of links (collectives and transfers) are changed
by 10 %, each apart from the other, and the best of the first layouts of the ranking are simulated again. The
regret is what the winner takes longer than the best of them then. Only these are compared: a strategy that
the search left out may gain as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from piper.search.candidate import Candidate
from piper.search.evaluate import Evaluator

ERROR = 0.1
"""By which share rates are changed."""
STRATEGIES = 5
"""Of the ranking, compared."""
KERNELS, LINKS = ("matmul", "attention", "memory"), ("collective",)
_CHANGES: tuple[tuple[str, tuple[str, ...], float], ...] = (
    ("kernels 10 % faster", KERNELS, 1 + ERROR),
    ("kernels 10 % slower", KERNELS, 1 - ERROR),
    ("links 10 % faster", LINKS, 1 + ERROR),
    ("links 10 % slower", LINKS, 1 - ERROR),
)
BASIS = (
    "the first strategies of the ranking, simulated again with all rates of kernels or of links changed; "
    "regret = step time of the winner / least step time among them - 1"
)


def robustness_of(winner: Candidate, others: Sequence[Candidate], evaluator: Evaluator) -> dict[str, Any]:
    """Simulate the winner and others on changed hardware; return how often, and by how much, it loses.

    Args:
        winner: of the search.
        others: of the ranking.
        evaluator: of the job.
    """
    compared = [winner, *(other for other in others if other != winner)]
    rows: list[dict[str, Any]] = []
    for change, kinds, rate in _CHANGES:
        changed = evaluator.with_rates(kinds, rate)
        times = [float(changed.simulate(candidate)["step_time_s"]) for candidate in compared]
        best = min(range(len(times)), key=lambda i: (times[i], i))
        rows.append(
            {
                "change": change,
                "winner_s": times[0],
                "best": str(compared[best].shorthand),
                "best_s": times[best],
                "stays_best": best == 0,
                "regret": times[0] / times[best] - 1,
            }
        )
    return {
        "strategies": len(compared),
        "stays_best": sum(row["stays_best"] for row in rows) / len(rows),
        "largest_regret": max(row["regret"] for row in rows),
        "changes": rows,
        "basis": BASIS,
    }

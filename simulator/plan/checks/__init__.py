"""Static checks of a plan, by name, in the order in which their findings are listed.

To add a check: write `simulator/plan/checks/<name>.py` with a function `(Facts) -> list[Violation]`, add
one line to `CHECKS`, and a mutation test in `tests/simulator/plan/test_check.py` that breaks a legal plan
in one way and asserts the rule that is found. `Facts` holds what several checks need: task codes and what
happens before what on each device. Checks are linear in tasks: use its columns, not pairs of tasks.

Each check runs only when the plan's indices are in range, and those of `NEEDS_ORDER` only when no device
waits in a circle (otherwise nothing happens before anything).
"""

from collections.abc import Callable

from simulator.plan.checks.collectives import check_collectives
from simulator.plan.checks.contributions import check_contributions
from simulator.plan.checks.coverage import check_coverage
from simulator.plan.checks.cycles import check_cycles, check_rendezvous
from simulator.plan.checks.dataflow import check_dataflow
from simulator.plan.checks.exchanges import check_exchanges
from simulator.plan.checks.facts import Facts
from simulator.plan.checks.groups import check_groups
from simulator.plan.checks.lifetime import check_lifetime
from simulator.plan.checks.recomputation import check_recomputation
from simulator.plan.checks.regrouping import check_regrouping
from simulator.plan.checks.sizes import check_sizes
from simulator.plan.checks.transfers import check_transfers
from simulator.plan.checks.updates import check_updates
from simulator.plan.checks.violation import Violation

CHECKS: dict[str, Callable[[Facts], list[Violation]]] = {
    "cycles": check_cycles,
    "rendezvous": check_rendezvous,
    "transfers": check_transfers,
    "groups": check_groups,
    "collectives": check_collectives,
    "coverage": check_coverage,
    "dataflow": check_dataflow,
    "exchanges": check_exchanges,
    "regrouping": check_regrouping,
    "recomputation": check_recomputation,
    "lifetime": check_lifetime,
    "sizes": check_sizes,
    "contributions": check_contributions,
    "updates": check_updates,
}

NEEDS_ORDER = frozenset(
    {
        "rendezvous",
        "collectives",
        "coverage",
        "dataflow",
        "regrouping",
        "lifetime",
        "contributions",
        "updates",
    }
)

__all__ = ["CHECKS", "NEEDS_ORDER", "Facts", "Violation"]

"""Static checks: may this plan hang, lose or corrupt work? Answered before anything runs."""

from __future__ import annotations

from simulator.errors import IllegalPlanError
from simulator.plan.checks import CHECKS, NEEDS_ORDER, Facts, Violation
from simulator.plan.checks.memory import least_bytes
from simulator.plan.checks.origin import with_origin
from simulator.plan.indices import faults
from simulator.plan.plan import Plan


def check_plan(plan: Plan) -> list[Violation]:
    """Return every reason why `plan` is illegal, in the order of `CHECKS`; nothing when it is legal.

    Each names the directives that it comes from, where the plan says them.

    Where an index is out of range, only those are returned, and where a device waits in a circle, only
    what can be said without an order of its tasks.
    """
    broken = [
        Violation(rule="index", message=f"{fault.place} = {fault.value} {fault.rule}")
        for fault in faults(plan)
    ]
    if broken:
        return broken
    facts = Facts.of(plan)
    circular = any(device.stuck for device in facts.devices)
    names = [name for name in CHECKS if not (circular and name in NEEDS_ORDER)]
    found = [violation for name in names for violation in CHECKS[name](facts)]
    return [with_origin(plan, violation) for violation in found]


def least_memory_bytes(plan: Plan) -> tuple[int, ...]:
    """Return, by pipeline rank, bytes that any execution of a legal plan has allocated at some moment."""
    return least_bytes(Facts.of(plan))


def require_legal(plan: Plan, *, where: str = "plan") -> None:
    """Raise `IllegalPlanError` with every violation unless `plan` is legal."""
    found = check_plan(plan)
    if found:
        raise IllegalPlanError(where=where, violations=[str(violation) for violation in found])


__all__ = ["Violation", "check_plan", "least_memory_bytes", "require_legal"]

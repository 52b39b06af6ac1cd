"""Errors of the simulator: plans that cannot be read, and plans that are illegal.

InputError
├── PlanError          a plan (file) that cannot be used               (exit 2)
└── IllegalPlanError   a plan that would hang, lose or corrupt work    (exit 4)
"""

from __future__ import annotations

from collections.abc import Sequence

from cost_models.errors import InputError


class PlanError(InputError):
    """A plan or timeline file that cannot be read, or a table that contradicts itself."""


class IllegalPlanError(InputError):
    """A plan that the static checker refuses; `violations` lists every reason."""

    code = "illegal_plan"
    exit_code = 4

    def __init__(self, *, where: str, violations: Sequence[str]) -> None:
        self.violations = tuple(violations)
        super().__init__(
            where=where,
            field="violations",
            value=len(violations),
            rule="must be 0: " + "; ".join(violations[:3]),
            fix="change the order or placement named above; `piper check` lists all violations",
        )

"""From a violation back to the strategy: which directive, at which line, decides what is wrong.

A plan does not say why a task exists, but it carries the directives and their places. Each rule has the
kinds of directives that can cause it, the likeliest first; of the first kind that the strategy has, those
are named whose filter may mean a stage of the violation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from simulator.plan.checks.violation import Violation
from simulator.plan.plan import Plan

_ORDER = ("order", "place", "split")
_PLACE = ("place", "mesh", "order")
_REDUCE = ("replicate", "mesh")
_MEMORY = ("offload", "recompute", "order", "split")
_EXCHANGE = ("shard_tensor", "shard_sequence", "shard")

ORIGINS: Mapping[str, tuple[str, ...]] = {
    "cycle": _ORDER,
    "circular-wait": _ORDER,
    "launch-order": _ORDER,
    "transfer-order": _ORDER,
    "collective-order": _ORDER,
    "collective-count": _REDUCE,
    "collective-unordered": _REDUCE,
    "collective-stranger": ("mesh", "replicate"),
    "transfer-unmatched": _PLACE,
    "transfer-repeated": _PLACE,
    "transfer-missing": _PLACE,
    "transfer-misplaced": _PLACE,
    "transfer-size": ("split", "place"),
    "transfer-bytes": ("split", "place"),
    "edge-missing": _PLACE,
    "stage-lost": _PLACE,
    "wrong-stage": _PLACE,
    "wrong-copy": _ORDER,
    "forward-count": _ORDER,
    "backward-count": _ORDER,
    "missing-order": _ORDER,
    "exchange-count": _EXCHANGE,
    "never-regrouped": ("mesh",),
    "recomputed-twice": ("recompute",),
    "never-recomputed": ("recompute",),
    "wrong-microbatch": _MEMORY,
    "never-allocated": _MEMORY,
    "never-freed": _MEMORY,
    "allocated-twice": _MEMORY,
    "freed-twice": _MEMORY,
    "persistent-allocated": _MEMORY,
    "persistent-freed": _MEMORY,
    "before-allocate": _MEMORY,
    "read-after-free": _MEMORY,
    "freed-while-read": _MEMORY,
    "missing-wait": _MEMORY,
    "buffer-too-small": ("split", "place"),
    "buffer-size": ("split", "recompute"),
    "never-reduced": _REDUCE,
    "reduced-twice": _REDUCE,
    "never-updated": _REDUCE,
    "updated-twice": _REDUCE,
    "never-gathered": _REDUCE,
    "gathered-twice": _REDUCE,
    "never-normed": _REDUCE,
    "normed-twice": _REDUCE,
    "stale-parameters": _REDUCE,
}
"""Rule -> kinds of directives, the likeliest first; rules about a file (indices) come from none."""

_STAGE = re.compile(r": (\d+)[A-Z]")
_BUCKET = re.compile(r"@(?!norm)")
_MOST = 3


def with_origin(plan: Plan, violation: Violation) -> Violation:
    """Return the violation with the directives that it comes from, as "order (strategy.json:14)"."""
    stages = {*violation.stages, *(int(n) for task in violation.tasks for n in _STAGE.findall(task))}
    for op in _kinds(violation):
        entries = [(number, entry) for number, entry in enumerate(plan.directives) if entry.get("op") == op]
        if entries:
            meant = [one for one in entries if not stages or _may_mean(one[1], stages)] or entries
            names = dict.fromkeys(_name(plan, number, op) for number, _ in meant)
            return replace(violation, directives=tuple(names)[:_MOST])
    return violation


def _kinds(violation: Violation) -> tuple[str, ...]:
    kinds = ORIGINS.get(violation.rule, ())
    of_bucket = violation.rule == "missing-order" and any(map(_BUCKET.search, violation.tasks))
    return (*_REDUCE, *kinds) if of_bucket else kinds


def _name(plan: Plan, number: int, op: str) -> str:
    place = plan.directive_places[number] if number < len(plan.directive_places) else ""
    return f"{op} ({place})" if place else op


def _may_mean(entry: Mapping[str, Any], stages: set[int]) -> bool:
    """Return whether a directive may apply to one of the stages; what we cannot read may."""
    slots = entry.get("filters")
    filters = [f for slot in slots for f in slot] if isinstance(slots, list) else [entry.get("filter")]
    named = [_stages(one) for one in filters]
    return any(one is None or not one.isdisjoint(stages) for one in named)


def _stages(which: object) -> set[int] | None:
    """Return the stages that a filter lists, or None where it does not list them one by one."""
    value = which.get("PP") if isinstance(which, dict) else None
    values = value if isinstance(value, list) else [value]
    numbers = {int(one) for one in values if isinstance(one, int) or (isinstance(one, str) and one.isdigit())}
    return numbers if len(numbers) == len(values) else None

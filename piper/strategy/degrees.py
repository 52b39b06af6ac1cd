"""Degrees of a strategy: gpus = pp x dp x cp x tp; experts regroup dp x cp x tp (DESIGN 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from piper.directives import Mesh, Replicate, Shard
from piper.errors import JobError, StrategyError
from piper.strategy.strategy import Strategy

MOST_GPUS = 2**20
"""Far beyond any cluster; the plan lists every rank, so that a slip of the keyboard would fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Every degree, and the GPUs that they make."""

    gpus: int
    tp: int
    pp: int
    cp: int
    dp: int


def require_plannable(gpus: int, *, field: str = "gpus") -> None:
    """Raise JobError for more devices than a plan may have."""
    if gpus > MOST_GPUS:
        raise JobError(
            where="--gpus",
            field=field,
            value=gpus,
            rule=f"is more than {MOST_GPUS}, the most that a plan may have",
            fix="use fewer GPUs",
        )


def find_degrees(
    strategy: Strategy, *, gpus: int | None, gpus_per_node: int, defaults: dict[str, object]
) -> Degrees:
    """Return all degrees; dp follows from the others where it is left out.

    Raises: StrategyError or JobError where they do not make the number of GPUs.
    """
    stated = strategy.stated.degrees
    if "pp" not in stated:
        defaults["pp"] = 1
    inner = {name: stated.get(name, 1) for name in ("pp", "cp", "tp")}
    product = prod(inner.values()) * stated.get("dp", 1)
    if gpus is None:
        gpus = product if stated else max(gpus_per_node, product)
        defaults["gpus"] = gpus
    names = " x ".join(name for name in ("pp", "dp", "cp", "tp") if name in {"pp", "dp"} or name in stated)
    require_plannable(max(gpus, product), field="gpus" if gpus >= product else names)
    if "dp" in stated and product != gpus:
        rest = gpus // prod(inner.values()) if gpus % prod(inner.values()) == 0 else 0
        raise StrategyError(
            where=strategy.line_of(Mesh),
            field=names,
            value=product,
            rule=f"is not the number of GPUs, {gpus}",
            fix=f"use gpus = {product}, or leave dp out" + (f" (dp = {rest})" if rest else ""),
        )
    _check_divides(strategy, inner, gpus)
    dp = gpus // prod(inner.values())
    if "dp" not in stated:
        defaults["dp"] = dp
    _check_regrouping(strategy, dp=dp, cp=inner["cp"], tp=inner["tp"])
    return Degrees(gpus=gpus, dp=dp, **inner)


def _check_divides(strategy: Strategy, inner: Mapping[str, int], gpus: int) -> None:
    product = prod(inner.values())
    if gpus % product == 0:
        return
    stated = {name: size for name, size in inner.items() if size > 1}
    divisors = ", ".join(str(d) for d in range(1, gpus + 1) if gpus % d == 0)
    raise StrategyError(
        where=strategy.line_of(Mesh), field=" x ".join(stated), value=product,
        rule=f"does not divide the {gpus} GPUs",
        fix=f"use a divisor of {gpus}: {divisors}",
    )  # fmt: skip


def _check_regrouping(strategy: Strategy, *, dp: int, cp: int, tp: int) -> None:
    """Check what divides the ranks of a stage: shards of the state, and groups of experts."""
    stated = strategy.stated
    if stated.hsdp is not None and dp * cp % stated.hsdp:
        raise StrategyError(
            where=strategy.line_of(Replicate, Mesh), field="hsdp", value=stated.hsdp,
            rule=f"does not divide the {dp * cp} replicas (dp x cp)", fix=f"use a divisor of {dp * cp}",
        )  # fmt: skip
    experts = (stated.ep or 1) * (stated.etp or 1)
    if dp * cp * tp % experts:
        name, value = ("ep", stated.ep) if stated.etp in {None, 1} else ("ep x etp", experts)
        raise StrategyError(
            where=strategy.line_of(Shard, Mesh), field=name, value=value,
            rule=f"does not divide the {dp * cp * tp} ranks (dp x cp x tp) of a stage",
            fix=f"use a divisor of {dp * cp * tp}",
        )  # fmt: skip

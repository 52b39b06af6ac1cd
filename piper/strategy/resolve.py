"""A strategy meets a job: degrees, batch sizes and defaults, checked and written down.

Nothing here needs the model; `piper.strategy.complete` adds what does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from piper.directives import Split
from piper.errors import JobError, StrategyError
from piper.schedules import MOST_PASSES
from piper.strategy.shorthand import Shorthand
from piper.strategy.strategy import Strategy

T = TypeVar("T")

DEFAULT_SCHEDULE = "1f1b"
MOST_GPUS = 2**20
"""Far beyond any cluster; the plan lists every rank, so that a slip of the keyboard would fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A strategy with every number known.

    Args:
        strategy: as it was stated.
        shorthand: all of pp, dp, zero, schedule, recompute, micro_batch.
        gpus: pp x dp.
        global_batch: sequences per step.
        split: the cut of a replica's batch; `sizes` its result.
        defaults: what was assumed, by name.
        notices: what the user should know.
    """

    strategy: Strategy
    shorthand: Shorthand
    gpus: int
    global_batch: int
    split: Split
    sizes: tuple[int, ...]
    defaults: Mapping[str, object]
    notices: tuple[str, ...]

    @property
    def pp(self) -> int:
        """Return the pipeline degree."""
        return self.shorthand.pp or 1

    @property
    def dp(self) -> int:
        """Return the data-parallel degree."""
        return self.shorthand.dp or 1

    @property
    def replica_batch(self) -> int:
        """Return the sequences per step of one replica."""
        return self.global_batch // self.dp


def resolve(
    strategy: Strategy,
    *,
    gpus: int | None,
    gpus_per_node: int,
    global_batch: int | None,
    micro_batch: int | None,
) -> Resolved:
    """Return the strategy with all numbers; raises StrategyError or JobError for contradictions.

    Args:
        strategy: as stated.
        gpus: size of the job, or None: the product of the stated degrees, else one node.
        gpus_per_node: of the cluster.
        global_batch: sequences per step, or None: the default number of microbatches.
        micro_batch: sequences per microbatch (option), or None.
    """
    defaults: dict[str, object] = {}
    stated = strategy.stated
    total, pp, dp = _degrees(strategy, gpus=gpus, gpus_per_node=gpus_per_node, defaults=defaults)
    schedule = stated.schedule or _default(defaults, "schedule", DEFAULT_SCHEDULE)
    zero = stated.zero if stated.zero is not None else _default(defaults, "zero", 0)
    recompute = stated.recompute or _default(defaults, "recompute", "none")
    split = _split(strategy, micro_batch=micro_batch, defaults=defaults)
    if global_batch is None:
        number = split.num_microbatches or 2 * pp
        global_batch = dp * number * (split.micro_batch or 1)
        defaults["global_batch"] = global_batch
    _check_multiple(global_batch, dp)
    _check_number_of_passes(split.number_of(global_batch // dp), pp=pp)
    sizes = split.sizes(global_batch // dp)
    notices: tuple[str, ...] = ()
    if zero and dp == 1:
        notices = (f"zero={zero} shards over one replica: it changes nothing",)
    complete = Shorthand(
        pp=pp, dp=dp, zero=zero, schedule=schedule, recompute=recompute, micro_batch=max(sizes)
    )  # fmt: skip
    return Resolved(
        strategy=strategy,
        shorthand=complete,
        gpus=total,
        global_batch=global_batch,
        split=split,
        sizes=sizes,
        defaults=defaults,
        notices=notices,
    )


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


def _degrees(
    strategy: Strategy, *, gpus: int | None, gpus_per_node: int, defaults: dict[str, object]
) -> tuple[int, int, int]:
    degrees = strategy.stated.degrees
    pp = degrees.get("pp")
    if pp is None:
        pp = _default(defaults, "pp", 1)
    product = pp * degrees.get("dp", 1)
    if gpus is None:
        gpus = product if degrees else max(gpus_per_node, pp)
        defaults["gpus"] = gpus
    require_plannable(max(gpus, product), field="gpus" if gpus >= product else "pp x dp")
    if "dp" in degrees and product != gpus:
        raise StrategyError(
            where=strategy.where,
            field="pp x dp",
            value=product,
            rule=f"is not the number of GPUs, {gpus}",
            fix=f"use gpus = {product}, or leave dp out"
            + (f" (dp = {gpus // pp})" if gpus % pp == 0 else ""),
        )
    if gpus % pp:
        raise StrategyError(
            where=strategy.where, field="pp", value=pp, rule=f"does not divide the {gpus} GPUs",
            fix=f"use a divisor of {gpus}: {', '.join(str(d) for d in range(1, gpus + 1) if gpus % d == 0)}",
        )  # fmt: skip
    if "dp" not in degrees:
        defaults["dp"] = gpus // pp
    return gpus, pp, gpus // pp


def _split(strategy: Strategy, *, micro_batch: int | None, defaults: dict[str, object]) -> Split:
    listed = [d for d in strategy.directives if isinstance(d, Split)]
    split = listed[0] if listed else Split(micro_batch=strategy.stated.micro_batch, where=strategy.where)
    if micro_batch is not None and split.micro_batch not in {None, micro_batch}:
        raise JobError(
            where="--micro-batch",
            field="micro_batch",
            value=micro_batch,
            rule=f"contradicts micro_batch = {split.micro_batch} in {split.where}",
            fix="give it once, or equal",
        )
    if micro_batch is not None:
        split = replace(split, micro_batch=micro_batch)
    if split.micro_batch is None and split.num_microbatches is None:
        split = replace(split, micro_batch=_default(defaults, "micro_batch", 1))
    return split


def _check_multiple(global_batch: int, dp: int) -> None:
    if global_batch % dp:
        below, above = global_batch // dp * dp, -(-global_batch // dp) * dp
        valid = " or ".join(str(value) for value in (below, above) if value > 0)
        raise JobError(
            where="--global-batch",
            field="global_batch",
            value=global_batch,
            rule=f"is no multiple of dp = {dp}",
            fix=f"use {valid}",
        )


def _check_number_of_passes(num_microbatches: int, *, pp: int) -> None:
    most = MOST_PASSES // pp
    if num_microbatches > most:
        raise JobError(
            where="--global-batch",
            field="microbatches of a replica",
            value=num_microbatches,
            rule=f"are more than {most}, the most that a plan with pp = {pp} may have",
            fix="raise --micro-batch or dp, or lower --global-batch",
        )


def _default(defaults: dict[str, object], name: str, value: T) -> T:
    defaults[name] = value
    return value

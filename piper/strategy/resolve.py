"""A strategy meets a job: degrees, batch sizes and defaults, checked and written down.

Nothing here needs the model; `piper.strategy.complete` adds what does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from piper.directives import Order, Place, Split
from piper.errors import JobError, StrategyError
from piper.schedules import MOST_PASSES, copies_of, default_virtual_stages, find_schedule, unchecked_rows
from piper.strategy.degrees import Degrees, find_degrees
from piper.strategy.habits import Habits
from piper.strategy.local_sizes import captured_sizes, least_micro_batch
from piper.strategy.places import places_of_stages
from piper.strategy.shorthand import Shorthand
from piper.strategy.strategy import Strategy

T = TypeVar("T")

DEFAULT_SCHEDULE = "1f1b"
CUSTOM = "custom"
"""The schedule of a strategy that states rows, or places that no default schedule suits."""
SCHEDULE_OF_SEVERAL_STAGES = "interleaved_1f1b"
"""Defaults with one stage per pipeline rank, and with several (CONTRACT)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A strategy with every number known.

    Args:
        strategy: as it was stated.
        shorthand: all of pp, dp, zero, schedule, recompute, micro_batch; of the rest what differs from 1.
        gpus: pp x dp x cp x tp.
        global_batch: sequences per step.
        split: the cut of a replica's batch; `sizes` its result.
        captured_sizes: of microbatches on any stage: `sizes` without repetition, then those of stages with a
            mesh of their own.
        defaults: what was assumed, by name.
        habits: what the stack does besides.
        notices: what the user should know.
    """

    strategy: Strategy
    shorthand: Shorthand
    gpus: int
    global_batch: int
    split: Split
    sizes: tuple[int, ...]
    captured_sizes: tuple[int, ...]
    defaults: Mapping[str, object]
    notices: tuple[str, ...]
    habits: Habits = field(default_factory=Habits)

    @property
    def pp(self) -> int:
        """Return the pipeline degree."""
        return self.shorthand.pp or 1

    @property
    def dp(self) -> int:
        """Return the data-parallel degree."""
        return self.shorthand.dp or 1

    @property
    def tp(self) -> int:
        """Return the tensor-parallel degree."""
        return self.shorthand.tp or 1

    @property
    def cp(self) -> int:
        """Return the context-parallel degree."""
        return self.shorthand.cp or 1

    @property
    def vp(self) -> int:
        """Return the stages per pipeline rank."""
        return self.shorthand.vp or 1

    @property
    def schedule(self) -> str:
        """Return the name of the schedule, or "custom"."""
        return self.shorthand.schedule or ""

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
    habits: Habits | None = None,
    num_layers: int | None = None,
) -> Resolved:
    """Return the strategy with all numbers; raises StrategyError or JobError for contradictions.

    Args:
        strategy: as stated.
        gpus: size of the job, or None: the product of the stated degrees, else one node.
        gpus_per_node: of the cluster.
        global_batch: sequences per step, or None: the default number of microbatches.
        micro_batch: sequences per microbatch (option), or None.
        habits: defaults of the stack, or None: those of the contract.
        num_layers: of the model, for habits that count stages by them, or None: unknown.
    """
    defaults: dict[str, object] = {}
    habits = habits or Habits()
    degrees = find_degrees(strategy, gpus=gpus, gpus_per_node=gpus_per_node, defaults=defaults)
    least = least_micro_batch(strategy, degrees)
    of_split: dict[str, object] = {}
    split = _split(strategy, micro_batch=micro_batch, least=least, defaults=of_split)
    number = None if global_batch is None else split.number_of(global_batch // degrees.dp)
    strategy = _with_habits(strategy, degrees, habits, defaults=defaults, sizes=(num_layers, number))
    stated = strategy.stated
    schedule, vp = _schedule(strategy, degrees.pp, defaults)
    zero = stated.zero if stated.zero is not None else _default(defaults, "zero", 0)
    recompute = stated.recompute or _default(defaults, "recompute", "none")
    defaults |= of_split
    if global_batch is None:
        number = split.num_microbatches or _least_microbatches(schedule, degrees.pp, vp)
        global_batch = degrees.dp * number * (split.micro_batch or least)
        defaults["global_batch"] = global_batch
    _check_multiple(global_batch, degrees.dp)
    _check_number_of_passes(split.number_of(global_batch // degrees.dp), pp=degrees.pp)
    sizes = split.sizes(global_batch // degrees.dp)
    replicas = max((mesh.size("dp") for mesh in strategy.stage_meshes), default=1)
    shards = max(degrees.dp, replicas) * degrees.cp
    notices = tuple(_notices(zero=zero, shards=shards, pp=degrees.pp, microbatches=len(sizes)))
    sp = stated.sp or (_default(defaults, "sp", "on") if degrees.tp > 1 else None)
    complete = replace(
        stated,
        tp=_many(degrees.tp),
        pp=degrees.pp,
        vp=_many(vp),
        cp=_many(degrees.cp),
        ep=_many(stated.ep),
        etp=_many(stated.etp),
        dp=degrees.dp,
        zero=zero,
        sp=sp if degrees.tp > 1 else None,
        schedule=schedule,
        recompute=recompute,
        micro_batch=max(sizes),
    )
    return Resolved(
        strategy=strategy,
        shorthand=complete,
        gpus=degrees.gpus,
        global_batch=global_batch,
        split=split,
        sizes=sizes,
        captured_sizes=captured_sizes(strategy, degrees, sizes),
        defaults=defaults | habits.assumed,
        notices=notices,
        habits=habits,
    )


def _with_habits(
    strategy: Strategy,
    degrees: Degrees,
    habits: Habits,
    *,
    defaults: dict[str, object],
    sizes: tuple[int | None, int | None],
) -> Strategy:
    """Return the strategy with what the stack does where nothing is stated, as far as it applies.

    `sizes`: layers of the model and microbatches of a replica, None where they are not known.
    """
    stated, ways = strategy.stated, habits.ways
    found: dict[str, object] = {}
    if degrees.pp > 1 and not any(isinstance(d, Order | Place) for d in strategy.directives):
        found |= _pipeline(stated, degrees.pp, habits, sizes=sizes)
    if not strategy.directives:
        zero = stated.zero if stated.zero is not None else ways.zero
        shards, parts = degrees.dp * degrees.cp > 1, degrees.tp > 1
        applies = {
            "zero": shards, "bucket_mb": shards, "prefetch": shards and zero == _CUT_PARAMETERS,
            "sp": parts, "async_tp": parts, "recompute": True, "offload": True,
        }  # fmt: skip
        found |= {name: getattr(ways, name) for name, applied in applies.items() if applied}
        if habits.etp_is_tp and parts and (stated.ep or 1) > 1:
            found["etp"] = degrees.tp
    new = {name: v for name, v in found.items() if v is not None and getattr(stated, name) is None}
    defaults |= {name: value for name, value in new.items() if name not in habits.chosen}
    return replace(strategy, stated=replace(stated, **new))  # type: ignore[arg-type]


_CUT_PARAMETERS = 3
"""ZeRO level."""


def _pipeline(
    stated: Shorthand, pp: int, habits: Habits, *, sizes: tuple[int | None, int | None]
) -> dict[str, object]:
    """Return the schedule and the stages per rank of a stack; nothing where either is stated."""
    if stated.vp is not None or stated.schedule is not None:
        return {}
    found: dict[str, object] = {"schedule": habits.ways.schedule, "vp": habits.ways.vp}
    layers, microbatches = sizes
    if habits.layer_per_stage and layers and layers > pp:
        even = layers % pp == 0 and (microbatches is None or microbatches % pp == 0)
        found["vp"] = layers // pp if even else 1
    if found["vp"] not in {None, 1} and found["schedule"] == DEFAULT_SCHEDULE:
        found["schedule"] = SCHEDULE_OF_SEVERAL_STAGES
    return found


def _notices(*, zero: int, shards: int, pp: int, microbatches: int) -> Iterator[str]:
    if zero and shards == 1:
        yield f"zero={zero} shards over one replica: it changes nothing"
    if microbatches < pp:
        number = f"{microbatches} microbatch{'es' if microbatches > 1 else ''}"
        yield f"{number} for {pp} pipeline ranks: bubble, as most ranks wait; {2 * pp} or more fill them"


def _schedule(strategy: Strategy, pp: int, defaults: dict[str, object]) -> tuple[str, int]:
    """Return the schedule and the stages per pipeline rank, each as stated, placed or implied."""
    stated, where = strategy.stated, strategy.line_of(Order)
    placed = {stage for d in strategy.directives if isinstance(d, Place) for stage in d.stages}
    on_each = len(placed) // pp if placed and len(placed) % pp == 0 else None
    asked = stated.vp or on_each
    if stated.schedule == CUSTOM:
        return CUSTOM, asked or 1
    if stated.schedule is None and not _lies_in_a_loop(strategy, pp):
        return _default(defaults, "schedule", CUSTOM), asked or 1
    schedule = stated.schedule or _default(
        defaults, "schedule", DEFAULT_SCHEDULE if asked in {None, 1} else SCHEDULE_OF_SEVERAL_STAGES
    )
    if stated.vp is not None:
        return schedule, stated.vp
    if on_each is not None:
        return schedule, on_each * copies_of(find_schedule(schedule, where=where))
    return schedule, default_virtual_stages(schedule, where=where)


def _lies_in_a_loop(strategy: Strategy, pp: int) -> bool:
    """Tell whether the default schedules suit the places: each rank holds r, r + pp, ..., equally many."""
    listed = [d for d in strategy.directives if isinstance(d, Place)]
    if not listed:
        return True
    places = places_of_stages(listed, num_pipeline_ranks=pp)
    held = [[stage for stage, place in enumerate(places) if place.pp == rank] for rank in range(pp)]
    return len(places) % pp == 0 and sorted(held) == [list(range(r, len(places), pp)) for r in range(pp)]


def _least_microbatches(schedule: str, pp: int, vp: int) -> int:
    """Return 2 x pp, or the next number that the schedule takes (CONTRACT); 2 x pp where it takes none."""
    if schedule == CUSTOM:
        return 2 * pp
    for number in range(2 * pp, 4 * pp + 1):
        try:
            unchecked_rows(
                schedule, num_pipeline_ranks=pp, num_microbatches=number, virtual_stages_per_rank=vp
            )
        except StrategyError:
            continue
        return number
    return 2 * pp


def _many(degree: int | None) -> int | None:
    return degree if degree is not None and degree > 1 else None


def _split(strategy: Strategy, *, micro_batch: int | None, least: int, defaults: dict[str, object]) -> Split:
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
        split = replace(split, micro_batch=_default(defaults, "micro_batch", least))
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

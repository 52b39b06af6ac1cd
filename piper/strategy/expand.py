"""The shorthand as directives: what each key means."""

from __future__ import annotations

from piper.directives import Offload, Recompute, Replicate, Shard, ShardSequence, ShardTensor
from piper.directives.recompute import SELECTED
from piper.graph import CapturedModel, Filter
from piper.graph.directive import Directive
from piper.strategy.resolve import Resolved

_OPTIMIZER, _GRADIENTS, _PARAMETERS = 1, 2, 3
"""ZeRO levels."""


def directives_of_shorthand(resolved: Resolved, model: CapturedModel) -> list[Directive]:
    """Return the directives that the keys besides pp, schedule and micro_batch mean."""
    stated, where = resolved.shorthand, resolved.strategy.where
    everything = Filter.parse({"PP": "*"}, where=where)
    found: list[Directive] = []
    if resolved.dp * resolved.cp > 1 or stated.zero:
        found.append(_replicate(resolved, everything))
    if (stated.ep or 1) * (stated.etp or 1) > 1:
        which = Filter.parse({"EP": "*"}, where=where)
        found.append(Shard(filter=which, degree=stated.ep or 1, tensor_degree=stated.etp or 1, where=where))
    if resolved.tp > 1:
        found.append(
            ShardTensor(
                filter=Filter.parse({"TP": "*"}, where=where),
                sequence_parallel=stated.sp != "off",
                asynchronous=stated.async_tp == "on",
                where=where,
            )
        )
    if resolved.cp > 1:
        found.append(ShardSequence(filter=Filter.parse({"CP": "*"}, where=where), where=where))
    if stated.recompute not in {None, "none"}:
        found.append(_recompute(resolved, model))
    if stated.offload not in {None, "none"}:
        found.append(Offload(filter=everything, what=str(stated.offload), where=where))
    return found


def _replicate(resolved: Resolved, everything: Filter) -> Replicate:
    stated = resolved.shorthand
    zero = stated.zero or 0
    return Replicate(
        filter=everything,
        shard_optimizer=zero >= _OPTIMIZER,
        shard_grads=zero >= _GRADIENTS,
        shard_params=zero >= _PARAMETERS,
        shard_ranks=stated.hsdp,
        bucket_mb=stated.bucket_mb,
        prefetch=stated.prefetch,
        where=resolved.strategy.where,
    )


def _recompute(resolved: Resolved, model: CapturedModel) -> Recompute:
    where, text = resolved.strategy.where, str(resolved.shorthand.recompute)
    tag = "LAYER" if any("LAYER" in dict(s.tags) for s in model.segments) else "PP"
    which = Filter.parse({tag: "*"}, where=where)
    if text == "ops" or (text == "selective" and resolved.habits.selective == "ops"):
        return Recompute(filter=which, mode="ops", where=where)
    if text == "selective":
        return Recompute(filter=which, mode="selective", ops=SELECTED, where=where)
    layers = text.removeprefix("full").removeprefix(":")
    return Recompute(filter=which, layers=int(layers) if layers else None, where=where)

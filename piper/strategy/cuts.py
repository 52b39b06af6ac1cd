"""`cut` of a shorthand: where the model is cut into stages."""

from __future__ import annotations

from collections.abc import Sequence

from cost_models.errors import whole_number
from piper.errors import StrategyError
from piper.graph import CapturedModel, balanced_cut, default_cut, units_of

EVEN, BALANCED = "even", "balanced"
_SIGN = "+"


def is_cut(text: str) -> bool:
    """Return whether a text is a value of `cut`: even, balanced, or units of every stage (9+10+10+8)."""
    counts = [whole_number(part) for part in text.split(_SIGN)]
    return text in {EVEN, BALANCED} or all(count is not None and count > 0 for count in counts)


def units_of_stages(
    model: CapturedModel, cut: str, *, ranks: Sequence[int], recompute: str, where: str = "--strategy"
) -> tuple[int, ...]:
    """Return the units that each stage takes.

    Args:
        model: to be cut.
        cut: even, balanced (by FLOPs), or units of every stage.
        ranks: of each stage, the pipeline rank that holds it.
        recompute: of the strategy: layers that are computed again count with that.
        where: for errors.
    Raises: StrategyError for too many stages, or other numbers of units.
    """
    units = units_of(model)
    even = default_cut(units, len(ranks), where=where)
    if cut == EVEN:
        return even
    if cut == BALANCED:
        return balanced_cut(_flops_of_units(model, recompute=recompute), ranks)
    stated = tuple(int(part) for part in cut.split(_SIGN))
    if len(stated) != len(even) or sum(stated) != units.count:
        raise StrategyError(
            where=where, field="cut", value=cut,
            rule=f"must give each of {len(even)} stages its part of the model's {units.count} units",
            fix=f"the default is cut={_SIGN.join(map(str, even))}",
        )  # fmt: skip
    return stated


def _flops_of_units(model: CapturedModel, *, recompute: str) -> list[int]:
    """Return the FLOPs of each unit for one microbatch, of all its passes."""
    found: dict[int, int] = {}
    for segment, unit in zip(model.segments, units_of(model).of_segment, strict=True):
        again = recompute == "full" and "LAYER" in dict(segment.tags)
        passes = (segment.forward, segment.backward_inputs, segment.backward_weights)
        forward, *backward = (sum(o.flops * o.count for o in each.operations) for each in passes)
        found[unit] = found.get(unit, 0) + forward * (2 if again else 1) + sum(backward)
    return [found[unit] for unit in sorted(found)]

"""The cut of a model into stages: which pipeline units go into which stage.

[Note: default cut]
Units are the "PP" scopes of the model. With L layers (units tagged LAYER; all units where none is) and S
stages: if L % S = 0, L/S layers each, what stands before the layers joins the first stage and what stands
after them the last; else every unit counts one, counts differ by at most one, and the larger counts go to
the middle stages first, then to the first stage, then to the last; among equals the earlier stage first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_models.errors import check_invariant
from piper.errors import ModelError, StrategyError
from piper.graph.captured import CapturedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """The pipeline units of a model.

    Args:
        of_segment: unit of every segment, never falling.
        before, layers, after: units before the first layer, layers, units after the last layer.
    """

    of_segment: tuple[int, ...]
    before: int
    layers: int
    after: int

    @property
    def count(self) -> int:
        """Return the number of units."""
        return self.before + self.layers + self.after


def units_of(model: CapturedModel) -> Units:
    """Return the pipeline units of a captured model; raises ModelError when PP scopes run backwards."""
    numbers: list[int] = []
    for segment in model.segments:
        tags = dict(segment.tags)
        numbers.append(tags.get("PP", numbers[-1] if numbers else 0))
        if len(numbers) > 1 and numbers[-1] < numbers[-2]:
            raise ModelError(
                where=model.facts.name, field="PP", value=numbers[-1], rule=f"comes after PP {numbers[-2]}",
                fix='let the indices of annotate("PP") rise through the forward pass',
            )  # fmt: skip
    dense = {number: i for i, number in enumerate(dict.fromkeys(numbers))}
    of_segment = tuple(dense[number] for number in numbers)
    layers = sorted(
        {
            unit
            for unit, segment in zip(of_segment, model.segments, strict=True)
            if "LAYER" in dict(segment.tags)
        }
    )
    if not layers:
        return Units(of_segment=of_segment, before=0, layers=len(dense), after=0)
    before, after = layers[0], len(dense) - 1 - layers[-1]
    return Units(of_segment=of_segment, before=before, layers=len(dense) - before - after, after=after)


def default_cut(units: Units, num_stages: int, *, where: str = "strategy") -> tuple[int, ...]:
    """Return how many units each stage takes; raises StrategyError when there are too few units."""
    if num_stages > units.count:
        limit = f"{units.layers} layers" + (
            f" + {units.count - units.layers}" if units.count > units.layers else ""
        )
        raise StrategyError(
            where=where, field="stages (pp x vp)", value=num_stages,
            rule=f"is more than the model's {limit} = {units.count} units",
            fix=f"use at most {units.count} stages",
        )  # fmt: skip
    if units.layers % num_stages == 0:
        counts = [units.layers // num_stages] * num_stages
        counts[0] += units.before
        counts[-1] += units.after
        return tuple(counts)
    each, rest = divmod(units.count, num_stages)
    counts = [each] * num_stages
    for stage in (*range(1, num_stages - 1), 0, num_stages - 1)[:rest]:
        counts[stage] += 1
    return tuple(counts)


def stages_of_segments(units: Units, counts: Sequence[int]) -> tuple[int, ...]:
    """Return the stage of every segment for given unit counts per stage."""
    check_invariant(sum(counts) == units.count and min(counts) > 0, f"unit counts {counts} of {units.count}")
    stage_of_unit = [stage for stage, count in enumerate(counts) for _ in range(count)]
    return tuple(stage_of_unit[unit] for unit in units.of_segment)

"""Rows for stages that are all alike: costs of passes and a cap in microbatches, as schedules take them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from piper.schedules.rows import stages_by_rank
from piper.schedules.synthesis.pipeline import Pipeline


def equal_pipeline(
    layout: str,
    counts: tuple[int, int, int],
    *,
    costs: Mapping[str, Fraction],
    memory_cap: Fraction | None,
) -> Pipeline:
    """Return the pipeline of equal stages.

    Args:
        layout: of the stages, a name of `rows.LAYOUTS`.
        counts: pipeline ranks, microbatches, stages per rank.
        costs: of F, BI, BW and comm, in any one unit; kept (default 1).
        memory_cap: microbatches of a rank's whole model part; None: as many as there are ranks.

    Raises: ValueError for a cap below one microbatch.
    """
    num_pipeline_ranks, num_microbatches, per_rank = counts
    cap = Fraction(num_pipeline_ranks) if memory_cap is None else memory_cap
    if cap < 1:
        raise ValueError(f"a pass needs one microbatch in flight, the memory cap is {cap}")
    stages = stages_by_rank(num_pipeline_ranks, per_rank, layout=layout)
    count = num_pipeline_ranks * per_rank
    home = {stage: rank for rank, held in enumerate(stages) for stage in held}
    kept = costs.get("kept", Fraction(1))
    whole = math.lcm(kept.denominator, cap.denominator)
    unit = math.lcm(*(costs[name].denominator for name in ("F", "BI", "BW", "comm")))

    def times(name: str) -> tuple[int, ...]:
        return (int(costs[name] * unit),) * count

    hop = int(costs["comm"] * unit)
    return Pipeline(
        stages=stages,
        num_microbatches=num_microbatches,
        forward_ns=times("F"),
        inputs_ns=times("BI"),
        weights_ns=times("BW"),
        hop_ns=tuple(hop if home[s] != home[s + 1] else 0 for s in range(count - 1)),
        held_bytes=(whole,) * count,
        left_bytes=(int(kept * whole),) * count,
        cap_bytes=(int(cap * per_rank * whole),) * num_pipeline_ranks,
    )


def equal_rows(
    layout: str,
    counts: tuple[int, int, int],
    *,
    costs: Mapping[str, Fraction],
    memory_cap: Fraction | None,
) -> list[list[str]]:
    """Return the best rows found for the pipeline of equal stages; see `equal_pipeline`."""
    from piper.schedules.synthesis.find import synthesize

    pipeline = equal_pipeline(layout, counts, costs=costs, memory_cap=memory_cap)
    return [list(row) for row in synthesize(pipeline).rows]

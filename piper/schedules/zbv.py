"""ZBV: two stages per rank in a V, BI and BW apart; no bubble with F = BI = BW, the memory of 1F1B.

Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), section 6; orders as in torch's
`ScheduleZBVZeroBubble`. Rank r runs stage r on the way down and stage 2p - 1 - r on the way up.
[Note: steps that a short run skips]
The order is that of 2p - 1 microbatches or more. With fewer, the passes of those that do not exist drop out,
which leaves an order that can run, and more idle time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import count

from piper.schedules.limits import require_memory, require_two_stages
from piper.schedules.rows import laid_out


@laid_out("v")
def rows(
    *,
    num_pipeline_ranks: int,
    num_microbatches: int,
    virtual_stages_per_rank: int,
    costs: Mapping[str, Fraction],
    memory_cap: Fraction | None,
) -> list[list[str]]:
    """Return forwards until the first microbatch is back up, F BI BW of both stages in turn, late BW last.

    min(m, p) microbatches are in flight on every rank, as 2p passes of half a rank's layers.
    Raises: ValueError unless each rank holds two stages, or for a memory cap below that.
    """
    require_two_stages("zbv", virtual_stages_per_rank)
    require_memory("zbv", min(num_microbatches, num_pipeline_ranks), memory_cap)
    return [
        [
            f"{stage}{kind}{microbatch}"
            for stage, kind, microbatch in _row(num_pipeline_ranks, rank, num_microbatches)
            if microbatch < num_microbatches
        ]
        for rank in range(num_pipeline_ranks)
    ]


def _row(num_pipeline_ranks: int, rank: int, num_microbatches: int) -> Iterator[tuple[int, str, int]]:
    """Yield stage, kind and microbatch of each pass; see [Note: steps that a short run skips]."""
    behind = num_pipeline_ranks - rank
    down, up = rank, 2 * num_pipeline_ranks - 1 - rank
    microbatches = max(num_microbatches, 2 * num_pipeline_ranks - 1)
    next_of = {(stage, kind): count() for stage in (down, up) for kind in ("F", "BI", "BW")}

    def run(stage: int, *kinds: str, times: int = 1) -> Iterator[tuple[int, str, int]]:
        for _ in range(times):
            for kind in kinds:
                yield stage, kind, next(next_of[stage, kind])

    yield from run(down, "F", times=2 * behind - 1)
    for _ in range(rank):
        yield from run(up, "F")
        yield from run(down, "F")
    yield from run(up, "F", "BI", "BW", times=behind)
    for number in range(num_pipeline_ranks, microbatches):
        forward = ("F",) if number + behind - 1 < microbatches else ()
        yield from run(down, *forward, "BI", "BW")
        yield from run(up, "F", "BI", "BW")
    for _ in range(rank):
        yield from run(down, "BI")
        yield from run(up, "BI")
    yield from run(down, "BI", "BW", times=behind)
    yield from run(up, "BW", times=rank)
    yield from run(down, "BW", times=rank)

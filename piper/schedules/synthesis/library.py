"""The known schedules of a pipeline's stages: orders that compete, and whose blocks a search starts from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import ModuleType

from piper.schedules import (
    dualpipe_v,
    interleaved_1f1b,
    interleaved_zb,
    one_f_one_b,
    v_half,
    v_min,
    zb_1p,
    zb_2p,
    zb_h1,
    zb_h2,
    zbv,
)
from piper.schedules.rows import stages_by_rank
from piper.schedules.synthesis.pipeline import Pipeline

_ONE_STAGE = {"1f1b": one_f_one_b, "zb_h1": zb_h1, "zb_h2": zb_h2, "zb_1p": zb_1p, "zb_2p": zb_2p}
_LOOPS = {"interleaved_1f1b": interleaved_1f1b, "interleaved_zb": interleaved_zb}
_VS = {"zbv": zbv, "v_half": v_half, "v_min": v_min, "dualpipe_v": dualpipe_v}


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A known order of a pipeline's stages: its name, and rows as codes."""

    name: str
    rows: Sequence[Sequence[object]]


def known_schedules(pipeline: Pipeline) -> Iterator[Known]:
    """Yield an order that fits any legal cap, then the schedules that have rows for these stages."""
    yield Known(name="one by one", rows=_one_by_one(pipeline))
    ranks, per_rank = len(pipeline.stages), len(pipeline.stages[0])
    for name, module in _modules(pipeline).items():
        try:
            rows = module.rows(
                num_pipeline_ranks=ranks,
                num_microbatches=pipeline.num_microbatches,
                virtual_stages_per_rank=per_rank,
                costs=_mean_costs(pipeline),
                memory_cap=None,
            )
        except ValueError:  # the schedule has no rows for these counts
            continue
        yield Known(name=name, rows=rows)


def _modules(pipeline: Pipeline) -> dict[str, ModuleType]:
    ranks, per_rank = len(pipeline.stages), len(pipeline.stages[0])
    if pipeline.stages == stages_by_rank(ranks, per_rank):
        return _ONE_STAGE if per_rank == 1 else _LOOPS
    return _VS if pipeline.stages == stages_by_rank(ranks, per_rank, layout="v") else {}


def _mean_costs(pipeline: Pipeline) -> dict[str, Fraction]:
    """Return the mean costs of the stages, for schedules that weigh them."""
    forward, inputs, weights = (Fraction(int(row.sum()), pipeline.num_stages) for row in pipeline.costs)
    hop = Fraction(sum(pipeline.hop_ns), max(1, len(pipeline.hop_ns)))
    return {
        "F": forward, "BI": inputs, "BW": weights, "B": inputs + weights,
        "FB": forward + inputs + weights, "comm": hop,
    }  # fmt: skip


def _one_by_one(pipeline: Pipeline) -> list[list[str]]:
    """Return rows that begin with a microbatch once the one before has left the rank."""
    return [
        [
            code
            for m in range(pipeline.num_microbatches)
            for code in (
                *(f"{s}F{m}" for s in sorted(held)),
                *(f"{s}{kind}{m}" for s in sorted(held, reverse=True) for kind in ("BI", "BW")),
            )
        ]
        for held in pipeline.stages
    ]

"""A schedule without a model: rows -> simulated times, exact in the unit of the costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from cost_models.models.unit import UnitCostModel
from piper.errors import StrategyError
from piper.schedules import copies_of, find_schedule, layout_of, schedule_rows
from piper.schedules.copies import Copies, in_model_stages
from piper.schedules.costs import NOT_TIMES, Costs, parse_costs
from piper.schedules.minimal_plan import WORKS, preview_plan
from piper.schedules.rows import Rows, Slot, show_rows, stages_by_rank
from simulator.plan.task import TaskKind
from simulator.simulation import simulate

_LARGEST_COST_NS = 10**12
"""Whole ns up to here survive the way through float seconds exactly, thousands of times in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One slot on a rank's row: its passes, start and end in the unit of the costs."""

    tasks: Slot
    start: Fraction
    end: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """A schedule drawn alone; all times in the unit of the costs.

    Args:
        rows: the schedule.
        stages: the stages of each pipeline rank.
        costs: what the passes cost.
        num_microbatches: microbatches per step.
        copies: of the model among the stages.
        spans: by pipeline rank, the slots as they ran.
    """

    rows: Rows
    stages: tuple[tuple[int, ...], ...]
    costs: Costs
    num_microbatches: int
    copies: int
    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> Fraction:
        """Return the end of the last pass on any rank."""
        return max(span.end for row in self.spans for span in row)

    @property
    def longest_rank_span(self) -> Fraction:
        """Return the longest time from a rank's first start to its last end."""
        return max(row[-1].end - row[0].start for row in self.spans)

    @property
    def bubble_fraction(self) -> Fraction:
        """Return 1 - work / makespan, over all ranks."""
        work = sum((span.end - span.start for row in self.spans for span in row), Fraction(0))
        return 1 - work / (len(self.rows) * self.makespan)

    @property
    def bubble_fraction_span(self) -> Fraction:
        """Return 1 - (passes of one rank) / longest_rank_span, as zero-bubble papers define it."""
        passes = self.costs["F"] + self.costs["BI"] + self.costs["BW"]
        stages = Fraction(len(self.stages[0]), self.copies)
        return 1 - self.num_microbatches * stages * passes / self.longest_rank_span

    @property
    def in_flight(self) -> tuple[Fraction, ...]:
        """Return by rank the most microbatches of its whole model part held at once.

        A stage counts 1 / (stages of the rank and copy) from the start of F to the end of B or BW; between
        BI and BW the share `kept` of it (default 1).
        """
        kept = self.costs.get("kept", Fraction(1))
        return tuple(
            _most_held(row, kept=kept) * self.copies / len(held)
            for row, held in zip(self.spans, self.stages, strict=True)
        )

    def to_json(self) -> dict[str, object]:
        """Return the object of `piper schedules --json`."""
        return {
            "rows": show_rows(self.rows),
            "makespan": _number(self.makespan),
            "longest_rank_span": _number(self.longest_rank_span),
            "bubble_fraction": _number(self.bubble_fraction),
            "bubble_fraction_span": _number(self.bubble_fraction_span),
            "in_flight": [_number(held) for held in self.in_flight],
            "peak_in_flight": _number(max(self.in_flight)),
        }


def preview_schedule(
    name: str,
    *,
    num_pipeline_ranks: int,
    num_microbatches: int,
    virtual_stages_per_rank: int = 1,
    costs: Costs | None = None,
    memory_cap: Fraction | None = None,
    engine: str = "auto",
    where: str = "schedule",
) -> Preview:
    """Simulate a schedule with the given costs of its passes (default: F = BI = BW = 1, comm = 0).

    Args are those of `schedule_rows`, and the simulation engine.
    Raises: StrategyError as `schedule_rows` does, for costs with too many digits, and for a slot that has
        no cost.
    """
    exact = parse_costs() if costs is None else costs
    rows = schedule_rows(
        name,
        num_pipeline_ranks=num_pipeline_ranks,
        num_microbatches=num_microbatches,
        virtual_stages_per_rank=virtual_stages_per_rank,
        costs=exact,
        memory_cap=memory_cap,
        where=where,
    )
    function = find_schedule(name, where=where)
    stages = stages_by_rank(num_pipeline_ranks, virtual_stages_per_rank, layout=layout_of(function))
    copies = copies_of(function)
    return preview_rows(rows, stages=stages, costs=exact, copies=copies, engine=engine, where=where)


def preview_rows(
    rows: Rows,
    *,
    stages: tuple[tuple[int, ...], ...],
    costs: Costs,
    copies: int = 1,
    engine: str = "auto",
    where: str = "schedule",
) -> Preview:
    """Simulate rows that `validate_rows` accepts.

    Raises: StrategyError for costs with too many digits, and for a slot that has no cost.
    """
    times = {name: cost for name, cost in costs.items() if name not in NOT_TIMES}
    unit = math.lcm(*(cost.denominator for cost in times.values()))
    durations = {name: _whole_ns(name, cost * unit, where) for name, cost in times.items()}
    plan = preview_plan(rows, stages=stages, durations_ns=durations, copies=copies, where=where)
    cost_model = UnitCostModel(
        {name: durations[name] / 1e9 for name in WORKS}, transfer_s=durations["comm"] / 1e9
    )
    timeline = simulate(plan, cost_model, steps=1, engine=engine)
    spans = []
    order = Copies(num_stages=sum(map(len, stages)), count=copies)
    for row, named, track in zip(rows, in_model_stages(rows, order), timeline.tracks, strict=True):
        spent = dict(
            zip(track.codes, zip(track.start_ns.tolist(), track.end_ns.tolist(), strict=True), strict=True)
        )
        spans.append(
            tuple(
                Span(tasks=slot, start=Fraction(spent[code][0], unit), end=Fraction(spent[code][1], unit))
                for slot, code in zip(row, (slot[0].code for slot in named), strict=True)
            )
        )
    return Preview(
        rows=rows,
        stages=stages,
        costs=costs,
        num_microbatches=plan.training.num_microbatches,
        copies=copies,
        spans=tuple(spans),
    )


def _whole_ns(name: str, cost: Fraction, where: str) -> int:
    """Return a scaled cost, one ns per smallest common unit."""
    if cost > _LARGEST_COST_NS:
        raise StrategyError(
            where=where,
            field=name,
            value=str(cost),
            rule="is more than 10^12 of the smallest unit in which all costs are whole",
            fix="give the costs with fewer digits",
        )
    return int(cost)


def _most_held(row: Sequence[Span], *, kept: Fraction) -> Fraction:
    """Return the most (stage, microbatch) pairs between F and the end of B or BW; at one time, ends first."""
    released = {TaskKind.B: Fraction(1), TaskKind.BI: 1 - kept, TaskKind.BW: kept}
    changes = []
    for span in row:
        for task in span.tasks:
            if task.kind is TaskKind.F:
                changes.append((span.start, Fraction(1)))
            else:
                changes.append((span.end, -released[task.kind]))
    held = most = Fraction(0)
    for _, change in sorted(changes):
        held += change
        most = max(most, held)
    return most


def _number(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else float(value)

"""A job with a pipeline -> the best order that is found for it, as a schedule file, simulated.

[Note: layouts that are tried]
Stages lie as the strategy says (a loop), and in a V with two stages per rank where the model has units
enough; backwards run in two halves, and in one piece. A simulation of a few microbatches in a known schedule
that fits measures each of these; the best orders under the memory that is left are simulated as whole jobs.
If none of them fits after all, orders are looked for again with so many bytes less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cost_models.errors import InputError
from piper.predict import Job, predict, prepare
from piper.schedules.csv_torch import write
from piper.schedules.entries import entries_of
from piper.schedules.rows import parse_rows
from piper.schedules.synthesis import Synthesis
from piper.search.synthesis.measure import pipeline_of
from piper.strategy import Shorthand, Strategy
from piper.workbench import Workbench
from simulator import build_workload, simulate, summarize
from simulator.plan import Plan
from simulator.timeline.timeline import Timeline

_RETRIES = 3
_SIMULATED = 4
"""Orders of each layout that are simulated: the simulator knows what list scheduling does not, such as how
transfers slow computation down."""
_IN_A_V = 2
_PROBED = 2
"""Microbatches of a probe, in pipeline depths: enough for every rank to hold its most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderRequest:
    """What to find an order for.

    Args:
        job: with its global batch; its strategy is not used.
        strategy: a shorthand with pp > 1; its schedule is not used.
        path: the schedule file to write.
        memory_bytes: most that a device may need, or None: what it has.
    """

    job: Job
    strategy: Shorthand
    path: Path
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundOrder:
    """An order that was found, written and simulated.

    Args:
        strategy: with `schedule` set to the file.
        result: of the simulation, as `piper.predict` gives it.
        synthesis: makespan and bound in the measured pipeline, without what the simulator knows beside it.
        probe: the known schedule in which the pipeline was measured.
    """

    strategy: Shorthand
    result: dict[str, Any]
    synthesis: Synthesis
    probe: str

    def to_json(self) -> dict[str, Any]:
        """Return the figures of an entry of `synthesized` in the result of a search."""
        found = self.synthesis
        return {
            "strategy": str(self.strategy),
            "schedule_file": self.strategy.schedule,
            "step_time_s": self.result["step_time_s"],
            "peak_memory_bytes": self.result["peak_memory_bytes"],
            "fits": self.result["fits"],
            "method": found.method,
            "measured_in": self.probe,
            "pipeline_s": found.makespan_ns / 1e9,
            "pipeline_bound_s": found.bound_ns / 1e9,
            "pipeline_gap": found.gap,
            "orders_tried": found.tried,
        }


def find_order(request: OrderRequest, *, bench: Workbench | None = None) -> FoundOrder | None:
    """Return the fastest order that fits, and leave its file at `request.path`; None: none fits.

    See [Note: layouts that are tried].
    """
    bench = bench or Workbench()
    best: FoundOrder | None = None
    for names in _layouts(request.strategy):
        for found in _orders(request, names, bench=bench):
            if best is None or found.result["step_time_s"] < best.result["step_time_s"]:
                best = found
    if best is None:
        request.path.unlink(missing_ok=True)
    else:
        _write(best.synthesis, request.path)
    return best


def _layouts(strategy: Shorthand) -> Iterator[tuple[Shorthand, ...]]:
    """Yield known schedules to measure each layout in, those that hold most first."""
    if (strategy.vp or 1) <= _IN_A_V:
        yield tuple(replace(strategy, vp=_IN_A_V, schedule=name) for name in ("zbv", "v_half", "v_min"))
    split, fused = ("interleaved_zb", "interleaved_1f1b") if (strategy.vp or 1) > 1 else ("zb_h1", "1f1b")
    for name in (split, fused):
        yield (replace(strategy, schedule=name),)


def _orders(request: OrderRequest, probes: Sequence[Shorthand], *, bench: Workbench) -> Iterator[FoundOrder]:
    """Yield orders of one layout that fit, simulated; none where the layout is not legal."""
    from piper.schedules.synthesis.find import synthesize_several

    measured = _measured(request, probes, bench=bench)
    if measured is None:
        return
    spare = measured.spare_bytes
    for _ in range(_RETRIES):
        try:
            pipeline = pipeline_of(
                measured.plan,
                measured.timeline,
                num_microbatches=measured.num_microbatches,
                spare_bytes=spare,
            )
        except ValueError:  # not even one microbatch fits
            return
        lacking = []
        for found in synthesize_several(pipeline)[:_SIMULATED]:
            _write(found, request.path)
            strategy = replace(measured.probe, schedule=str(request.path))
            job = replace(request.job, strategy=Strategy(stated=strategy))
            result = predict(job, bench=bench, verified=False).result
            lacking.append(-_spare_bytes(request, result))
            if lacking[-1] <= 0:
                probe = str(measured.probe.schedule)
                yield FoundOrder(strategy=strategy, result=result, synthesis=found, probe=probe)
        if min(lacking) <= 0:
            return
        spare -= min(lacking)


def _write(found: Synthesis, path: Path) -> None:
    order = entries_of(parse_rows(found.rows, where="order"))
    path.write_text(write(order), encoding="utf-8", newline="")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Measured:
    """A simulated plan of a few of a job's microbatches in a known schedule, and how many the job has."""

    probe: Shorthand
    plan: Plan
    timeline: Timeline
    spare_bytes: int
    num_microbatches: int


def _measured(request: OrderRequest, probes: Sequence[Shorthand], *, bench: Workbench) -> _Measured | None:
    """Return the first of the probes that fits, or else the last; None: the layout is not legal."""
    found: _Measured | None = None
    for probe in probes:
        try:
            prepared = prepare(replace(request.job, strategy=Strategy(stated=probe)), bench=bench)
            number = len(prepared.resolved.sizes)
            plan = prepared.plan(microbatches=min(number, _PROBED * prepared.resolved.pp), verified=False)
        except InputError:  # the model has too few units, or the schedule no rows for these counts
            continue
        workload = build_workload(plan, prepared.cost_model)
        timeline = simulate(plan, prepared.cost_model, steps=1, workload=workload)
        convention = request.job.mfu_convention
        result = summarize(plan, timeline, prepared.cost_model, workload=workload, convention=convention)
        found = _Measured(
            probe=probe,
            plan=plan,
            timeline=timeline,
            spare_bytes=_spare_bytes(request, result),
            num_microbatches=number,
        )
        if found.spare_bytes >= 0:
            break
    return found


def _spare_bytes(request: OrderRequest, result: dict[str, Any]) -> int:
    """Return what the worst rank could hold beyond what it needs."""
    most = request.memory_bytes or result["device_memory_bytes"]
    return int(most - result["needed_memory_bytes"])

"""A published run -> its step time as a sum of prices: what its critical path is made of.

[Note: rest of a step]  The simulation without contention is decomposed exactly; what contention adds, and the
difference by shortened runs, is a constant of the run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from piper.predict import compile_job, load_hardware
from piper.validation.jobs_of_rows import RowJob, job_of_row
from piper.validation.overlay import Overlay, overlaid
from piper.validation.rows import PublishedRow
from simulator import build_workload, simulate
from simulator.insight.critical_path import critical_path
from simulator.overheads import first_tasks
from simulator.plan import NONE, Plan, TaskKind
from simulator.pricing import COLLECTIVE_OF, Question, price_tasks, transfer_pairs

if TYPE_CHECKING:
    from cost_models.models.cluster import ClusterCostModel

Atom = tuple[Any, ...]
"""("operation", it), ("collective", kind, bytes, ranks), ("transfer", bytes, ranks), or one of `SECONDS`."""

SECONDS = {
    "launch": "launch_overhead_s",
    "communication": "communication_overhead_s",
    "pass": "pass_wait_s",
    "step": "step_wait_s",
}
REST = ("rest",)
"""Atom of what no parameter changes, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """A run as a sum.

    Args:
        case_id, source, half: of the run.
        hardware: cluster, stack and settings of its job.
        counts: how often each atom lies on the critical path of a step.
        measured_s: of the step.
    """

    case_id: str
    source: str
    half: str
    hardware: tuple[str, str, tuple[tuple[str, str], ...]]
    counts: dict[Atom, float]
    measured_s: float


def composition_of(row: PublishedRow, *, parameters: Overlay = ()) -> Composition | None:
    """Return the composition of a run under some parameters, or None: no step time was published.

    Raises: InputError as `job_of_row` and `predict`.
    """
    with overlaid(parameters):
        row_job = job_of_row(row)
        if row_job.measured_s is None:
            return None
        job = row_job.job
        _, cost_model = load_hardware(job.cluster, job.stack, settings=job.settings)
        counts: dict[Atom, float] = defaultdict(float)
        for weight, plan in _plans(row_job):
            for atom, count in _counts(plan, cost_model).items():
                counts[atom] += weight * count
    return Composition(
        case_id=row.case_id,
        source=row.file,
        half=row.half,
        hardware=(job.cluster, str(job.stack), job.settings),
        counts=dict(counts),
        measured_s=row_job.measured_s,
    )


def seconds_of(atom: Atom, cost_model: ClusterCostModel) -> float:
    """Return the price of an atom."""
    match atom:
        case ("operation", operation):
            return cost_model.operation(operation).seconds
        case ("collective", kind, size, ranks):
            return cost_model.collective(kind, size_bytes=size, ranks=ranks).seconds
        case ("transfer", size, (source, target)):
            return cost_model.transfer(size_bytes=size, source_rank=source, target_rank=target).seconds
        case ("rest",):
            return 1.0
        case (name,):
            return float(getattr(cost_model, SECONDS[name]))
        case _:
            raise ValueError(atom)


def _plans(row_job: RowJob) -> list[tuple[float, Plan]]:
    """Return plans and weights whose weighted step times are the job's: two short ones where it repeats.

    A step with m microbatches takes T(a) + (m - a) / (b - a) (T(b) - T(a)) once the pipeline is full.
    """
    job = row_job.job
    stated = job.strategy.stated
    pp, dp, micro = stated.pp or 1, stated.dp or 1, job.micro_batch or 1
    of_replica = (job.global_batch or 1) // dp
    number = math.ceil(of_replica / micro)
    few = max(2 * pp, 2)
    more = few + pp
    interleaved = (stated.vp or 1) > 1
    repeats = (stated.schedule or "1f1b") in {"1f1b", "interleaved_1f1b", "zb_h1"}
    if (
        not repeats
        or number <= more + pp
        or (number - few) % (pp if interleaved else 1)
        or of_replica % micro
    ):
        return [(1.0, compile_job(job).plan)]
    share = (number - few) / (more - few)
    counts = ((1 - share, few), (share, more))
    return [(w, compile_job(replace(job, global_batch=count * dp * micro)).plan) for w, count in counts]


def _counts(plan: Plan, cost_model: ClusterCostModel) -> dict[Atom, float]:
    workload = build_workload(plan, cost_model, contention=False)
    timeline = simulate(plan, cost_model, steps="auto", workload=workload)
    path = critical_path(workload, timeline)
    _, price, questions = price_tasks(plan, cost_model)
    passes, updates = first_tasks(plan)
    kernels = float((workload.prices.num_kernels[workload.price] * workload.is_compute)[price != NONE].sum())
    messages = float(np.count_nonzero(~workload.is_compute))
    launching = kernels * cost_model.launch_overhead_s + messages * cost_model.communication_overhead_s
    found: dict[Atom, float] = defaultdict(float)
    for part in path.parts:
        inside_ns = part.within(path.window_ns)
        task = part.instance % workload.num_tasks
        if inside_ns and part.is_host and launching:
            share = inside_ns / 1e9 / launching
            found["launch",] += share * kernels
            found["communication",] += share * messages
        elif inside_ns and not part.is_host:
            share = min(1.0, inside_ns / int(workload.duration_ns[task]))
            found["pass",] += share * bool(passes[task])
            found["step",] += share * bool(updates[task])
            if price[task] != NONE and price[task] < len(questions):
                _add(found, questions[price[task]], share=share, plan=plan, cost_model=cost_model)
    begin_ns, end_ns = path.window_ns
    explained = sum(count * seconds_of(atom, cost_model) for atom, count in found.items())
    found[REST] = (end_ns - begin_ns) / 1e9 - explained
    return found


def _add(
    found: dict[Atom, float], question: Question, *, share: float, plan: Plan, cost_model: ClusterCostModel
) -> None:
    size = question.size_bytes
    if question.work != NONE:
        for operation in plan.works[question.work].operations:
            found["operation", replace(operation, count=1)] += share * operation.count
    elif question.group != NONE:
        kind = COLLECTIVE_OF[TaskKind(question.kind)]
        sets = cost_model.distinct(plan.groups[question.group].members)
        ranks = max(sets, key=lambda r: cost_model.collective(kind, size_bytes=size, ranks=r).seconds)
        found["collective", kind, size, tuple(ranks)] += share
    elif question.source != question.target:
        pairs = cost_model.distinct(transfer_pairs(plan, question.source, question.target))
        pair = max(
            pairs,
            key=lambda p: cost_model.transfer(size_bytes=size, source_rank=p[0], target_rank=p[1]).seconds,
        )
        found["transfer", size, tuple(pair)] += share

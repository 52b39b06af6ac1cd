"""Monte-Carlo: many unfolded runs of one plan -> the distribution of step times, and who is to blame.

[Note: measured steps]  The first step of a run begins with idle devices and is not measured, unless it is the
    only one.
[Note: who is to blame]  By how much longer than without jitter others wait for a rank as the last arrival
    says who is late, not why: who is late may have waited for somebody else. So the worst are healed one by
    one, with the same draws for everybody else, and the run is repeated: what that saves is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cost_models.errors import InputError
from cost_models.price import CostModel
from simulator import rules
from simulator.engines import Settled, choose_engine, load_engine
from simulator.jitter.contention import alone, shared_between_ranks
from simulator.jitter.disturbance import Disturbance, named_ranks, resolve
from simulator.jitter.spec import WHERE, Clause, written
from simulator.jitter.unfold import Unfolding, run_explicitly
from simulator.jitter.unfolded_run import UnfoldedRun
from simulator.jitter.units import Units, folded, unfolded
from simulator.plan import Plan
from simulator.sharing import Sharing
from simulator.simulation import MOST_STEPS, has_settled
from simulator.workload import Workload

if TYPE_CHECKING:
    from simulator.jitter.run import Template

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MOST_RUNS = 20
MOST_TASKS = 200_000_000
"""Tasks of all runs that nobody asked for: half a minute of work."""
MOST_CONTENDED = 4_000_000
"""Tasks of a step of all ranks up to which ranks share links: some seconds, and half a GB, for each step."""
MOST_CONTENDED_TASKS = 10_000_000
"""Tasks of all runs that nobody asked for where ranks share links: ten seconds of work."""
MOST_BLAMED = 5
MOST_HEALED = 3
MOST_RECORDED = 64
"""Units that are all recorded; of more, a few that stand for the others."""

Report = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How often a step is drawn.

    Args:
        seed: of the first run; the others take the numbers behind it.
        runs: how many, or None: as many as take little time, at most 20.
        steps: of each run, or "auto".
        engine: "auto" or "fast": the kernel of unfolded runs; "reference": the reference engine.
    """

    seed: int = 0
    runs: int | None = None
    steps: int | str = "auto"
    engine: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blame:
    """A unit that others wait for; times are per measured step and rank.

    Args:
        ranks: of the unit, rising.
        caused_ns: how long others wait for it as the last arrival.
        excess_ns: by how much that is more than without jitter.
        waited_ns: how long it waits for others.
        saved_ns: by how much the mean step of the first run is shorter when these ranks are healthy; None:
            not tried.
    """

    ranks: tuple[int, ...]
    pipeline_rank: int
    node: int
    caused_ns: float
    excess_ns: float
    waited_ns: float
    saved_ns: float | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Study:
    """What many runs say.

    Args:
        clauses, sampling: what was asked; `sampling` with what was chosen.
        units: of the disturbed plan.
        undisturbed_ns: step time without jitter.
        step_ns: int64 [runs, measured steps].
        blames: the worst first.
        cost_ns: by clause, by how much the mean step of the first run is shorter without it.
        waited_ns, caused_ns: float64 [units], means over measured steps; see [Note: blame].
        shown: the run whose last step is nearest to the median, with times of some units.
        shown_seed: its seed.
        stands_for: how many ranks each unit recorded in `shown` stands for.
        is_random: whether anything is drawn.
        draws_per_group: whether the ranks of a tensor-parallel group draw together.
        contended: whether what runs at once on different ranks slows each other; None: it never does.
        notices: what the reader should know of the sampling.
    """

    clauses: tuple[Clause, ...]
    sampling: Sampling
    units: Units
    undisturbed_ns: int
    step_ns: Ints
    blames: tuple[Blame, ...]
    cost_ns: tuple[float, ...]
    waited_ns: Floats
    caused_ns: Floats
    shown: UnfoldedRun
    shown_seed: int
    stands_for: dict[int, int]
    is_random: bool
    draws_per_group: bool
    contended: bool | None
    notices: tuple[str, ...]


def study(
    plan: Plan,
    workload: Workload,
    clauses: Sequence[Clause],
    *,
    gpus_per_node: int,
    sampling: Sampling,
    cost_model: CostModel | None = None,
    report: Report = lambda _: None,
) -> Study:
    """Run `plan` again and again with the jitter that `clauses` describe.

    Args:
        plan, workload: what is run.
        clauses: from `parse_jitter`.
        gpus_per_node: ranks of a node.
        sampling: how often.
        cost_model: of the workload: says which links each rank shares; None: nothing slows anything else.
        report: called with what is being done.
    Raises: InputError for ranks that the job lacks; IllegalPlanError if the plan hangs.
    """
    shared, contends = None, workload.sharing is not None and cost_model is not None
    if cost_model is not None and contends and workload.num_tasks * workload.n_devices <= MOST_CONTENDED:
        report("what ranks share")
        everyone = unfolded(plan, resolve((), plan, gpus_per_node=gpus_per_node))
        shared = shared_between_ranks(plan, cost_model, Unfolding(plan, workload, everyone))
    job = _Job(
        plan=plan,
        workload=alone(plan, workload) if shared is None else workload,
        gpus_per_node=gpus_per_node,
        report=report,
        shared=shared,
    )
    found = job.study(tuple(clauses), sampling)
    return found if contends else replace(found, contended=None)


@dataclass(kw_only=True)
class _Job:
    """A plan to be run, and how."""

    plan: Plan
    workload: Workload
    gpus_per_node: int
    report: Report
    shared: tuple[Sharing, Ints] | None
    sampling: Sampling = field(default_factory=Sampling)
    settled: Settled = has_settled
    template: Template | None = None

    def study(self, clauses: tuple[Clause, ...], sampling: Sampling) -> Study:
        engine, warnings = choose_engine(
            "fast" if sampling.engine == "auto" else sampling.engine, num_tasks=0
        )
        sampling = replace(sampling, engine=engine)
        disturbance, healthy = self._resolved(clauses), self._resolved(())
        units = self._units(disturbance)
        self._require_in_range(disturbance, steps=sampling.steps)
        self.sampling, notices = self._chosen(sampling, units, is_random=disturbance.is_random)
        self.report("without jitter")
        before = self._run(healthy, self.sampling.seed, settled=has_settled)
        if isinstance(sampling.steps, int) or disturbance.is_random:
            self.settled = lambda _: False
        runs = []
        for number in range(self.sampling.runs or 1):
            self.report(f"run {number + 1} of {self.sampling.runs}")
            runs.append(self._run(disturbance, self.sampling.seed + number, units=units))
        step_ns = np.stack([_measured(run.period_ns) for run in runs])
        waited, caused = (_mean_by_unit(runs, name) for name in ("waited_ns", "caused_ns"))
        planned = _mean_by_unit([before], "caused_ns")[before.units.of_rank[units.first_rank]]
        mean_ns = float(step_ns[0].mean())
        healed = self._healed(disturbance, _worst(caused - planned), units=units, mean_ns=mean_ns)
        blames = tuple(
            Blame(
                ranks=tuple(units.ranks_of(unit)),
                pipeline_rank=int(self.workload.pipeline_rank[units.device[unit]]),
                node=int(disturbance.node[units.first_rank[unit]]),
                caused_ns=float(caused[unit]),
                excess_ns=float(caused[unit] - planned[unit]),
                waited_ns=float(waited[unit]),
                saved_ns=saved,
            )
            for unit, saved in healed
        )
        costs = self._costs(clauses, mean_ns)
        shown = _nearest_to_median(step_ns[:, -1])
        stands_for = _stands_for(
            self.plan, runs[shown], clauses=clauses, blames=blames, disturbance=disturbance
        )
        self.report("the run that is shown")
        return Study(
            clauses=clauses,
            sampling=self.sampling,
            units=units,
            undisturbed_ns=int(before.period_ns[-1]),
            step_ns=step_ns,
            blames=blames,
            cost_ns=costs,
            waited_ns=waited,
            caused_ns=caused,
            shown=self._run(disturbance, self.sampling.seed + shown, units=units, record=list(stands_for)),
            shown_seed=self.sampling.seed + shown,
            stands_for=stands_for,
            is_random=disturbance.is_random,
            draws_per_group=bool((disturbance.draw < np.arange(self.plan.num_ranks)).any()),
            contended=self.shared is not None,
            notices=(*warnings, *notices),
        )

    def _units(self, disturbance: Disturbance) -> Units:
        """Return as few units as there can be, or, where ranks share links, all ranks."""
        return (folded if self.shared is None else unfolded)(self.plan, disturbance)

    def _resolved(self, clauses: Sequence[Clause]) -> Disturbance:
        return resolve(clauses, self.plan, gpus_per_node=self.gpus_per_node)

    def _require_in_range(self, disturbance: Disturbance, *, steps: int | str) -> None:
        """Refuse jitter with which times could pass 2^62 ns: no path passes a task of the plan twice."""
        noises = (disturbance.compute_noise, disturbance.communication_noise)
        noise = max(float(table.max(initial=1.0)) for table in noises)
        factor = noise * max(float(disturbance.compute_factor.max()), float(disturbance.network_factor.max()))
        work = self.workload
        hiccups_ns = float(disturbance.hiccup_ns.max()) * work.num_tasks
        step_ns = float(work.duration_ns.sum(dtype=np.float64)) * max(factor, 1.0) + hiccups_ns
        step_ns += float(work.host_ns.sum(dtype=np.float64))
        total_ns = step_ns * (steps if isinstance(steps, int) else MOST_STEPS)
        if not rules.within_range(total_ns):
            raise InputError(
                where=WHERE,
                field="total time",
                value=f"{total_ns:.3g} ns",
                rule=f"must be at most 2^62 = {rules.MAX_TIME_NS} ns",
                fix="give smaller factors or shorter hiccups",
            )

    def _chosen(self, asked: Sampling, units: Units, *, is_random: bool) -> tuple[Sampling, tuple[str, ...]]:
        """Return how many runs of how many steps there are, and what to say about it."""
        steps = asked.steps if isinstance(asked.steps, int) else MOST_STEPS
        tasks = steps * int(np.diff(self.workload.device_starts)[units.device].sum())
        most = MOST_TASKS if self.shared is None else MOST_CONTENDED_TASKS
        runs = asked.runs or max(1, min(MOST_RUNS, most // max(tasks, 1)))
        if is_random or runs == 1:
            return replace(asked, runs=runs, steps=steps), ()
        notice = ("one run was simulated: nothing is drawn, all runs are the same",) if asked.runs else ()
        return replace(asked, runs=1, steps=steps), notice

    def _run(
        self,
        disturbance: Disturbance,
        seed: int,
        *,
        units: Units | None = None,
        record: Sequence[int] = (),
        settled: Settled | None = None,
    ) -> UnfoldedRun:
        """Run once; `units`, if the caller has them already."""
        units = self._units(disturbance) if units is None else units
        steps = self.sampling.steps if isinstance(self.sampling.steps, int) else MOST_STEPS
        settled = self.settled if settled is None else settled
        if self.sampling.engine == "reference" or self.shared is not None:
            return run_explicitly(
                self.plan, self.workload, units, disturbance=disturbance, seed=seed, max_steps=steps,
                settled=settled, engine=load_engine(self.sampling.engine), shared=self.shared, record=record,
            )  # fmt: skip
        from simulator.jitter.run import run_unfolded, template_of

        if self.template is None:
            self.template = template_of(self.plan, self.workload)
        return run_unfolded(
            self.template, units, disturbance, seed=seed, max_steps=steps, settled=settled, record=record
        )

    def _healed(
        self, disturbance: Disturbance, worst: Sequence[int], *, units: Units, mean_ns: float
    ) -> list[tuple[int, float | None]]:
        """Return by how much the mean step of the first run is shorter when each of `worst` is healthy."""
        found: list[tuple[int, float | None]] = []
        for place, unit in enumerate(worst):
            ranks = units.ranks_of(unit)
            if place >= MOST_HEALED:
                found.append((unit, None))
            elif disturbance.is_healthy[ranks].all():
                found.append((unit, 0.0))
            else:
                self.report(f"with rank {ranks[0]} healthy")
                run = self._run(disturbance.healed(ranks), self.sampling.seed)
                found.append((unit, mean_ns - float(_measured(run.period_ns).mean())))
        return found

    def _costs(self, clauses: Sequence[Clause], mean_ns: float) -> tuple[float, ...]:
        """Return by clause by how much the mean step of the first run is shorter without it."""
        found = []
        for number, clause in enumerate(clauses):
            self.report(f"without {written(clause)}")
            others = [*clauses[:number], *clauses[number + 1 :]]
            without = self._run(self._resolved(others), self.sampling.seed)
            found.append(mean_ns - float(_measured(without.period_ns).mean()))
        return tuple(found)


def _measured(by_step: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the steps that count; see [Note: measured steps]."""
    return by_step[1:] if len(by_step) > 1 else by_step


def _mean_by_unit(runs: Sequence[UnfoldedRun], name: str) -> Floats:
    """Return a column of all runs, [steps, units] each, as means over their measured steps."""
    found: Floats = np.mean([_measured(getattr(run, name)).mean(axis=0) for run in runs], axis=0)
    return found


def _worst(excess: Floats) -> list[int]:
    """Return the units that others wait for most beyond what is planned, the worst first."""
    order = np.argsort(-excess, kind="stable")[:MOST_BLAMED]
    return [unit for unit in order.tolist() if excess[unit] > 0]


def _nearest_to_median(last_ns: Ints) -> int:
    """Return the first run whose last step is the one in the middle."""
    return int(np.argsort(last_ns, kind="stable")[(len(last_ns) - 1) // 2])


def _stands_for(
    plan: Plan,
    run: UnfoldedRun,
    *,
    clauses: Sequence[Clause],
    blames: Sequence[Blame],
    disturbance: Disturbance,
) -> dict[int, int]:
    """Return which units to record, and how many ranks each stands for: all of them in sum."""
    units = run.units
    if units.num_units <= MOST_RECORDED:
        return dict(enumerate(units.num_ranks.tolist()))
    chosen = [int(units.of_rank[blame.ranks[0]]) for blame in blames]
    named = [named_ranks(clause, disturbance.node) for clause in clauses]
    chosen += [int(units.of_rank[ranks[0]]) for ranks in named if 0 < len(ranks) < plan.num_ranks]
    chosen.append(int(run.unit_end_ns[-1].argmax()))
    found = {unit: int(units.num_ranks[unit]) for unit in dict.fromkeys(chosen)}
    waited = run.waited_ns[-1]
    for device in range(len(plan.device_plans)):
        others = np.array([u for u in np.flatnonzero(units.device == device).tolist() if u not in found])
        if len(others):
            typical = others[np.argsort(waited[others], kind="stable")[(len(others) - 1) // 2]]
            found[int(typical)] = int(units.num_ranks[others].sum())
    return dict(sorted(found.items(), key=lambda entry: int(units.first_rank[entry[0]])))

"""Evaluate candidates of one job: bounds, estimates, simulations; the model is captured once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from piper.errors import JobError, StrategyError
from piper.graph import CapturedModel, units_of
from piper.graph.experts import count_experts
from piper.predict import Job, compile_resolved, load_hardware, require_cluster_holds, seq_len_of
from piper.search.candidate import Candidate
from piper.search.cells import CellTable, Frame
from piper.search.choices import Choices
from piper.search.estimate import Estimator
from piper.search.keeping import StateRules
from piper.search.network import Network
from piper.search.order_table import cost_key
from piper.search.schedule_rules import RULES, ScheduleRule
from piper.search.space import JobLimits, ModelLimits, Space, enumerate_space
from piper.search.thin import Kinds, kinds_of
from piper.search.unit_costs import UnitCostTable
from piper.shortened import simulate_short, with_microbatches
from piper.strategy import Resolved, Strategy, resolve
from piper.strategy.cuts import BALANCED, EVEN, units_of_stages
from piper.strategy.pass_costs import pass_costs
from piper.workbench import Workbench
from simulator.plan import Plan

if TYPE_CHECKING:
    from cost_models.models.cluster import ClusterCostModel
    from cost_models.ops import Operation
    from cost_models.topology import Cluster
    from piper.strategy.habits import Habits

SHORT_TOLERANCE = 1e-4
"""Of step times of jobs with many microbatches, simulated by fewer."""
_ENGINE = "fast"
"""Loading it pays for the second simulation."""
_HEADS = 1
"""Position of the heads in the shape of attention."""


@dataclass(kw_only=True)
class Evaluator:
    """Bounds, estimates and simulations of candidates of one job.

    Args:
        job: with gpus and global_batch stated; its strategy is not used.
        reserve_bytes: of a device, to leave free.
        only_runnable: whether what `piper run` refuses does not count as fitting.
    """

    job: Job
    reserve_bytes: int = 0
    only_runnable: bool = False
    _bench: Workbench = field(default_factory=Workbench)
    _models: dict[int, CapturedModel] = field(default_factory=dict)
    _balanced: dict[tuple[int, int, str], bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from piper.models import find_model
        from piper.recipe import habits_of

        model = self.job.model
        self.source = find_model(model) if isinstance(model, str) else model
        self.cluster, self.cost_model = load_hardware(
            self.job.cluster, self.job.stack, recipe=self.job.recipe, settings=self.job.settings
        )
        self.habits = habits_of(self.cost_model.stack, recipe=self.job.recipe, settings=self.job.settings)
        self.seq_len = seq_len_of(self.job, self.source)
        if self.job.gpus is None or self.job.global_batch is None:
            raise JobError(
                where="search", field="gpus, global_batch", value=None, rule="must be stated",
                fix="give --gpus and --global-batch",
            )  # fmt: skip
        require_cluster_holds(self.cluster, self.job.gpus)
        self.kinds = kinds_of(self.model(1))
        self.costs = UnitCostTable(
            job=self.job,
            cost_model=_with_room(self.cost_model, self.kinds.count),
            habits=self.habits,
            kinds=self.kinds,
            model=self.model,
        )

    cluster: Cluster = field(init=False)
    cost_model: ClusterCostModel = field(init=False)
    habits: Habits = field(init=False)
    seq_len: int = field(init=False)
    kinds: Kinds = field(init=False)
    costs: UnitCostTable = field(init=False)

    def with_rates(self, kinds: Sequence[str], rate: float) -> Evaluator:
        """Return an evaluator on hardware whose kinds of kernels have so many times their rates.

        Args:
            kinds: of "matmul", "attention", "memory", "collective" (see `Stack.slowdowns`).
            rate: 1.1 is 10 % faster.
        """
        from cost_models import cluster_cost_model

        other = Evaluator(job=self.job, reserve_bytes=self.reserve_bytes, _bench=self._bench)
        stack = self.cost_model.stack
        slowdowns = dict(stack.slowdowns) | {kind: stack.slowdowns[kind] / rate for kind in kinds}
        other.cost_model = cluster_cost_model(self.cluster, stack=replace(stack, slowdowns=slowdowns))
        return other

    @property
    def asked(self) -> tuple[Job, int, bool]:
        """Return what another process makes an equal evaluator of."""
        return self.job, self.reserve_bytes, self.only_runnable

    @property
    def demands(self) -> str:
        """Return what besides the job decides which results fit, as text; "" for nothing."""
        spare = f" leaving {self.reserve_bytes} B" if self.reserve_bytes else ""
        return f"{spare} runnable" if self.only_runnable else spare

    @property
    def capacity_bytes(self) -> int:
        """Return what a device has for tensors."""
        return self.cost_model.device_memory_bytes - self.cost_model.context_bytes - self.reserve_bytes

    @property
    def num_units(self) -> int:
        """Return at how many units the model can be cut."""
        return units_of(self.model(1)).count

    @property
    def limits(self) -> ModelLimits:
        """Return what of the model decides which strategies are legal."""
        model = self.model(1)
        units = units_of(model)
        operations: list[Operation] = [o for s in model.segments for o in s.forward.operations]
        heads = {
            o.shape[_HEADS] for o in operations if o.kind.value == "attention" and o.tensor_dim == _HEADS
        }
        tags = {name for s in model.segments for name, _ in s.tags}
        regions = [i for i, s in enumerate(model.segments) if "EP" in dict(s.tags)]
        return ModelLimits(
            num_units=units.count,
            num_layers=units.layers,
            heads=tuple(sorted(heads)),
            experts=tuple(sorted(set(count_experts(model, regions).values()))),
            cuts_tensors="TP" in tags,
            cuts_sequences="CP" in tags,
            balances=self._balances,
        )

    def space(self, choices: Choices) -> Space:
        """Return the space of the job."""
        job = JobLimits(
            global_batch=self.job.global_batch or 1,
            seq_len=self.seq_len,
            gpus_per_node=self.cluster.gpus_per_node,
        )
        return enumerate_space(choices, self.limits, job)

    def cells(self, space: Space) -> CellTable:
        """Return the bounds of all cells of a space."""
        return CellTable(
            space=space,
            units=units_of(self.model(1)),
            counts_of=self._counts_of,
            costs=self.costs,
            rules=StateRules(
                states=self.habits.states(self.job.dtype, optimizer=self.job.optimizer),
                optimizer=self.job.optimizer,
                gathers_overlap=self.habits.gathers_overlap is True,
            ),
            network=Network(cost_model=self.cost_model),
            capacity_bytes=float(self.capacity_bytes),
            framework_bytes=float((self.habits.framework_mb or 0) * 2**20),
            has_barrier=self.job.clip_grad_norm is not None,
            global_batch=self.job.global_batch or 1,
        )

    def _counts_of(self, cut: str, ranks: Sequence[int], recompute: str) -> tuple[int, ...]:
        """Return the units of each stage of a cut, as a strategy that says so has them."""
        return units_of_stages(self.model(1), cut, ranks=ranks, recompute=recompute)

    def _balances(self, pp: int, vp: int, schedule: str) -> bool:
        """Return whether a balanced cut is another one than the default."""
        rule = RULES.get(schedule)
        layout = rule.layout if rule is not None else "loop"
        if (pp, vp, layout) not in self._balanced:
            frame = Frame(
                pp=pp, vp=vp, schedule=0, cut=0, rule=rule or ScheduleRule(),
                members=np.zeros(0, dtype=np.int64),
            )  # fmt: skip
            known = frame.num_stages <= self.num_units
            self._balanced[pp, vp, layout] = known and any(
                self._counts_of(BALANCED, frame.ranks, again) != self._counts_of(EVEN, frame.ranks, again)
                for again in ("none", "full")
            )
        return self._balanced[pp, vp, layout]

    def estimator(self, table: CellTable) -> Estimator:
        """Return what estimates points of a table of cells."""
        return Estimator(table=table, costs=cost_key(pass_costs(self.model(1))))

    def model(self, micro_batch: int) -> CapturedModel:
        """Return the model captured at one microbatch size."""
        from piper.predict import captured

        if micro_batch not in self._models:
            self._models[micro_batch] = captured(
                self.job,
                self.source,
                self.cost_model,
                micro_batch=micro_batch,
                seq_len=self.seq_len,
                bench=self._bench,
            )
        return self._models[micro_batch]

    def simulate(self, candidate: Candidate) -> dict[str, Any]:
        """Return the shortened result of a full simulation."""
        from simulator import build_workload, simulate, summarize

        resolved = self._resolve(candidate)
        convention = self.job.mfu_convention
        short = simulate_short(
            resolved,
            lambda count: self._compile(with_microbatches(resolved, count)),
            self.cost_model,
            engine=_ENGINE,
            convention=convention,
            tolerance=SHORT_TOLERANCE,
        )
        if short is not None:
            result = short.result
        else:
            plan = self._compile(resolved)
            workload = build_workload(plan, self.cost_model)
            timeline = simulate(plan, self.cost_model, engine=_ENGINE, workload=workload)
            result = summarize(plan, timeline, self.cost_model, workload=workload, convention=convention)
        result |= {"cluster": self.cluster.name, "stack": self.job.stack}
        left = result["device_memory_bytes"] - result["needed_memory_bytes"]
        result["fits"] = result["fits"] and left >= self.reserve_bytes
        found = {key: result[key] for key in RESULT_KEYS} | {"peak": _fullest(result["ranks"])}
        refused = self._refused(candidate) if self.only_runnable else ""
        return found | ({"fits": False, "refused": refused} if refused else {})

    def _refused(self, candidate: Candidate) -> str:
        """Return why `piper run` does not run a candidate, or ""."""
        from piper.runtime.runnable import require_runnable

        resolved = self._resolve(candidate)
        few = min(len(resolved.sizes), max(1, 2 * resolved.pp))
        try:
            require_runnable(self._compile(with_microbatches(resolved, few)))
        except (JobError, StrategyError) as problem:
            return f"{problem.value} {problem.rule}"
        return ""

    def _compile(self, resolved: Resolved) -> Plan:
        models = [self.model(size) for size in resolved.captured_sizes]
        return compile_resolved(resolved, models, self.job, verified=False, bench=self._bench)

    def _resolve(self, candidate: Candidate) -> Resolved:
        return resolve(
            Strategy(stated=candidate.shorthand, where="search"),
            gpus=candidate.gpus,
            gpus_per_node=self.cluster.gpus_per_node,
            global_batch=self.job.global_batch,
            micro_batch=None,
            habits=self.habits,
            num_layers=self.source.num_layers,
        )


def _with_room(cost_model: ClusterCostModel, stages: int) -> ClusterCostModel:
    """Return the prices on a cluster that holds several stages where it has room for the ranks of one.

    Probes have a rank for every kind of unit. What a group of ranks costs depends on how it lies, not on how
    many nodes there are; where there is one node, and no network, the node is larger.
    """
    from cost_models import cluster_cost_model

    cluster = cost_model.cluster
    if cluster.max_nodes is None:
        return cost_model
    if cluster.inter is not None and cluster.host.cores is None:
        roomy = replace(cluster, max_nodes=None)
    else:
        roomy = replace(cluster, gpus_per_node=cluster.gpus_per_node * cluster.max_nodes * stages)
    return cluster_cost_model(roomy, stack=cost_model.stack)


def _fullest(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return where and when most memory is used: {pipeline_rank, peak_at_s, memory_by_class_bytes}."""
    worst = max(ranks, key=lambda rank: (rank["peak_memory_bytes"], -rank["pipeline_rank"]))
    return {name: worst[name] for name in ("pipeline_rank", "peak_at_s", "memory_by_class_bytes")}


RESULT_KEYS = (
    "model", "n_parameters", "cluster", "n_gpus", "strategy", "schedule", "stack", "step_time_s",
    "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "hfu", "mfu_convention", "peak_memory_bytes",
    "peak_reserved_bytes", "context_bytes", "communicator_bytes", "needed_memory_bytes",
    "device_memory_bytes", "fits", "bubble_fraction", "breakdown_s", "error_band",
)  # fmt: skip

_EVALUATOR: list[Evaluator] = []


def start_worker(job: Job, reserve_bytes: int = 0, only_runnable: bool = False) -> None:
    """Make the evaluator of a worker process."""
    _EVALUATOR[:] = [Evaluator(job=job, reserve_bytes=reserve_bytes, only_runnable=only_runnable)]


def simulate_in_worker(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """Simulate a chunk in a worker process."""
    return [_EVALUATOR[0].simulate(candidate) for candidate in candidates]

"""Evaluate candidates: a probe for the bounds, a simulation for the truth; the model is captured once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from piper.errors import JobError
from piper.graph import CapturedModel, units_of
from piper.predict import Job, captured, compile_resolved, load_hardware, require_cluster_holds, seq_len_of
from piper.search.bounds import StageProbe, memory_bound_bytes, probe_stages, step_time_bound_ns
from piper.search.space import Candidate
from piper.strategy import Resolved, Strategy, resolve
from piper.workbench import Workbench
from simulator.plan import Plan

if TYPE_CHECKING:
    from cost_models.models.cluster import ClusterCostModel
    from cost_models.topology import Cluster
    from piper.strategy.habits import Habits


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Lower bounds of a candidate: what it cannot beat.

    Args:
        step_time_s: of the step time.
        memory_bytes: of the worst rank's peak.
        worst_rank: that pipeline rank.
        capacity_bytes: what a device has for tensors.
    """

    step_time_s: float
    memory_bytes: int
    worst_rank: int
    capacity_bytes: int

    @property
    def fits(self) -> bool:
        """Return whether the candidate may fit."""
        return self.memory_bytes <= self.capacity_bytes

    def value_of(self, objective: str) -> float:
        """Return the bound of what a search minimises: bytes for "memory", else seconds."""
        return float(self.memory_bytes) if objective == "memory" else self.step_time_s


@dataclass(kw_only=True)
class Evaluator:
    """Bounds and simulations of candidates of one job.

    Args:
        job: with gpus and global_batch stated; its strategy is not used.
    """

    job: Job
    _bench: Workbench = field(default_factory=Workbench)
    _models: dict[int, CapturedModel] = field(default_factory=dict)
    _probes: dict[tuple[int, int, str, int], tuple[StageProbe, ...]] = field(default_factory=dict)

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

    cluster: Cluster = field(init=False)
    cost_model: ClusterCostModel = field(init=False)
    habits: Habits = field(init=False)
    seq_len: int = field(init=False)

    @property
    def num_units(self) -> int:
        """Return at how many units the model can be cut."""
        return units_of(self.model(1)).count

    def model(self, micro_batch: int) -> CapturedModel:
        """Return the model captured at one microbatch size."""
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

    def bounds(self, candidate: Candidate) -> Bounds:
        """Return lower bounds, from a probe that candidates of equal stages share."""
        key = (candidate.pp, candidate.micro_batch, candidate.recompute, candidate.zero)
        if key not in self._probes:
            one = replace(candidate, schedule="gpipe")
            plan = self._compile(one, global_batch=candidate.micro_batch * candidate.dp)
            self._probes[key] = probe_stages(plan, self.cost_model)
        replica_batch = (self.job.global_batch or 0) // candidate.dp
        full = replica_batch // candidate.micro_batch
        stages = self._probes[key]
        memory, worst = memory_bound_bytes(stages, num_microbatches=full, schedule=candidate.schedule)
        time_ns = step_time_bound_ns(
            stages, num_microbatches=full, has_barrier=self.job.clip_grad_norm is not None
        )
        capacity = self.cost_model.device_memory_bytes - self.cost_model.context_bytes
        return Bounds(
            step_time_s=time_ns / 1e9, memory_bytes=memory, worst_rank=worst, capacity_bytes=capacity
        )

    def simulate(self, candidate: Candidate) -> dict[str, Any]:
        """Return the shortened result of a full simulation."""
        from simulator import build_workload, simulate, summarize

        plan = self._compile(candidate, global_batch=self.job.global_batch or 0)
        workload = build_workload(plan, self.cost_model)
        timeline = simulate(plan, self.cost_model, workload=workload)
        convention = self.job.mfu_convention
        result = summarize(plan, timeline, self.cost_model, workload=workload, convention=convention)
        result |= {"cluster": self.cluster.name, "stack": self.job.stack}
        return {key: result[key] for key in RESULT_KEYS}

    def _compile(self, candidate: Candidate, *, global_batch: int) -> Plan:
        resolved = self._resolve(candidate, global_batch)
        models = [self.model(size) for size in resolved.captured_sizes]
        return compile_resolved(resolved, models, self.job, verified=False, bench=self._bench)

    def _resolve(self, candidate: Candidate, global_batch: int) -> Resolved:
        return resolve(
            Strategy(stated=candidate.shorthand, where="search"),
            gpus=self.job.gpus,
            gpus_per_node=self.cluster.gpus_per_node,
            global_batch=global_batch,
            micro_batch=None,
            habits=self.habits,
            num_layers=self.source.num_layers,
        )


RESULT_KEYS = (
    "model", "n_parameters", "cluster", "n_gpus", "strategy", "schedule", "stack", "step_time_s",
    "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "hfu", "mfu_convention", "peak_memory_bytes",
    "peak_reserved_bytes", "context_bytes", "communicator_bytes", "needed_memory_bytes",
    "device_memory_bytes", "fits", "bubble_fraction", "breakdown_s", "error_band",
)  # fmt: skip

_EVALUATOR: list[Evaluator] = []


def start_worker(job: Job) -> None:
    """Make the evaluator of a worker process."""
    _EVALUATOR[:] = [Evaluator(job=job)]


def simulate_in_worker(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """Simulate a chunk in a worker process."""
    return [_EVALUATOR[0].simulate(candidate) for candidate in candidates]

"""Model + strategy + job -> plan -> timeline -> result: the one facade below commands and search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from cost_models.errors import nearest, require_known, require_positive, require_positive_int
from cost_models.ops import DTYPE_BYTES, OPERAND_BITS, kept_dtype
from piper.compiler.compile import CompiledGraph, rewritten
from piper.directives import Order
from piper.errors import JobError
from piper.graph import CapturedModel, build_graph
from piper.laps import Clock
from piper.plan_store import plan_key
from piper.shortened import TOLERANCE, simulate_short, takes_other_counts, with_microbatches
from piper.strategy import Resolved, Strategy, complete, resolve
from piper.workbench import Workbench

if TYPE_CHECKING:
    from cost_models.models.cluster import ClusterCostModel
    from cost_models.price import CostModel
    from cost_models.topology import Cluster
    from piper.capture import KernelChoice
    from piper.models import ModelSource
    from piper.recipe import Settings
    from simulator.jitter import Clause
    from simulator.plan import Plan
    from simulator.timeline.timeline import Timeline

SCHEMA_VERSION = 1
DTYPES = ("bf16", "fp16", "fp32", *OPERAND_BITS)
OPTIMIZERS = ("adamw", "adamw8bit", "momentum", "sgd")
LATER_OPTIMIZERS = ("muon",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to train, how, and on what; None leaves a value to the default of the contract.

    Args:
        model: a name of `piper models`, a config.json (file or folder), or package.module:factory; or the
            source that one of these names.
        strategy: from `piper.strategy`.
        cluster: name or YAML file.
        gpus: number of devices.
        seq_len: tokens per sequence.
        global_batch: sequences per optimizer step.
        micro_batch: sequences per microbatch of a replica.
        dtype: compute dtype; one of `OPERAND_BITS` is for linear layers only (`cost_models.low_precision`).
        optimizer: of `OPTIMIZERS`; "momentum" is SGD with it, "sgd" without.
        clip_grad_norm: largest global gradient norm, or None: no clipping.
        stack: name or YAML file.
        mfu_convention: a name of `simulator.conventions.CONVENTIONS`.
        recipe, settings: what they change of the stack: kernels, habits, allocator (`piper.recipe`).
    """

    model: str | ModelSource
    strategy: Strategy = field(default_factory=Strategy)
    cluster: str = "dgx-h100"
    gpus: int | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    dtype: str = "bf16"
    optimizer: str = "adamw"
    clip_grad_norm: float | None = 1.0
    stack: str = "piper"
    mfu_convention: str = "palm"
    recipe: str | None = None
    settings: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """How ranks differ from the plan, and how often that is drawn (`docs/jitter.md`).

    Args:
        spec: what is written after `--jitter`, once or several times.
        seed: of the first run.
        runs: how many, or None: as many as take little time.
        report: called with what is being done.
    """

    spec: str | Sequence[str]
    seed: int = 0
    runs: int | None = None
    report: Callable[[str], object] = lambda _: None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledJob:
    """A job as a plan, with what was assumed on the way.

    Args:
        job: what was asked.
        source: the model that was found.
        model: as captured at the job's first microbatch.
        plan: what every device does.
        cluster, cost_model: the hardware and its prices.
        defaults: what was assumed, by name.
        timings_s: seconds per phase.
    """

    job: Job
    source: ModelSource
    model: CapturedModel
    plan: Plan
    cluster: Cluster
    cost_model: CostModel
    defaults: dict[str, object]
    timings_s: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prediction:
    """A simulated plan.

    Args:
        compiled: the job and its plan (None: a plan file was simulated).
        timeline: what happens when.
        result: the object of `piper simulate --json`.
    """

    compiled: CompiledJob | None
    timeline: Timeline
    result: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedJob:
    """A job whose model, hardware and numbers are known: what a plan is compiled from.

    Args:
        job: what was asked.
        source: the model that was found.
        resolved: the strategy with every number.
        models: the model as captured at each of `resolved.captured_sizes`.
        cluster, cost_model: the hardware and its prices.
        defaults: what was assumed, by name.
        timings_s: seconds per phase.
        kernels: for which it was captured.
        bench: what plans share.
    """

    job: Job
    source: ModelSource
    resolved: Resolved
    models: list[CapturedModel]
    cluster: Cluster
    cost_model: ClusterCostModel
    defaults: dict[str, object]
    timings_s: dict[str, float]
    kernels: KernelChoice
    bench: Workbench

    def plan(
        self,
        *,
        microbatches: int | None = None,
        on_pass: Callable[[str, str], None] | None = None,
        verified: bool = True,
    ) -> Plan:
        """Compile the job, or its first microbatches only; a plan that the bench's store has is read."""
        resolved = self.resolved
        if microbatches is not None:
            resolved = with_microbatches(resolved, microbatches)
        store, key = self.bench.plans, self._key(resolved)
        if store is None or key is None or on_pass is not None:
            return self._compiled(resolved, on_pass=on_pass, verified=verified)
        plan = store.load(key)
        if plan is None:
            plan = self._compiled(resolved, on_pass=None, verified=verified)
            store.keep(key, plan)
        return plan

    def _key(self, resolved: Resolved) -> str | None:
        """Return what decides the plan, or None: files of the user do."""
        if self.bench.plans is None or not takes_other_counts(resolved):
            return None
        fingerprint = self.bench.once("fingerprint", self.job.model, self.source.fingerprint)
        if fingerprint is None:
            return None
        job, habits, shape = self.job, resolved.habits, self.source.shape
        return plan_key(
            fingerprint, self.source.facts, shape.notices if shape is not None else (), self.kernels.key,
            self.models[0].seq_len, job.dtype, job.optimizer, job.clip_grad_norm,
            resolved.strategy.stated, resolved.shorthand, resolved.gpus, resolved.sizes,
            resolved.captured_sizes, resolved.split, resolved.notices,
            replace(habits, dtypes={}, chosen=frozenset()),
            sorted(habits.dtypes.items()), sorted(habits.chosen),
        )  # fmt: skip

    def _compiled(
        self, resolved: Resolved, *, on_pass: Callable[[str, str], None] | None, verified: bool
    ) -> Plan:
        shape = self.source.shape
        return compile_resolved(
            resolved,
            self.models,
            self.job,
            on_pass=on_pass,
            verified=verified,
            notices=shape.notices if shape is not None else (),
            bench=self.bench,
        )

    def compiled(self, plan: Plan, *, timings_s: dict[str, float]) -> CompiledJob:
        """Return the job with its plan."""
        return CompiledJob(
            job=self.job,
            source=self.source,
            model=self.models[0],
            plan=plan,
            cluster=self.cluster,
            cost_model=self.cost_model,
            defaults=self.defaults,
            timings_s=self.timings_s | timings_s,
        )


def _source_of(job: Job) -> ModelSource:
    from piper.models import find_model
    from piper.models.source import ModelSource

    return job.model if isinstance(job.model, ModelSource) else find_model(job.model)


def prepare(job: Job, *, bench: Workbench | None = None) -> PreparedJob:
    """Return a job with its model and hardware; `bench`: what it shares with other jobs.

    Raises: ModelError, StrategyError, JobError, CostModelError for what does not go together.
    """
    from piper.recipe import habits_of, kernels_of

    clock = Clock()
    _check_options(job)
    bench = bench or Workbench()
    source = bench.once("source", job.model, lambda: _source_of(job))
    cluster, cost_model = bench.once(
        "hardware",
        (job.cluster, job.stack, job.recipe, job.settings),
        lambda: load_hardware(job.cluster, job.stack, recipe=job.recipe, settings=job.settings),
    )
    kernels = kernels_of(cost_model, recipe=job.recipe, settings=job.settings)
    source = source.written_for(kernels)
    defaults: dict[str, object] = {}
    seq_len = seq_len_of(job, source)
    if job.seq_len is None:
        defaults["seq_len"] = seq_len
    resolved = resolve(
        job.strategy,
        gpus=job.gpus,
        gpus_per_node=cluster.gpus_per_node,
        global_batch=job.global_batch,
        micro_batch=job.micro_batch,
        habits=habits_of(cost_model.stack, recipe=job.recipe, settings=job.settings),
        num_layers=source.num_layers,
    )
    require_cluster_holds(cluster, resolved.gpus)
    clock.lap("resolve")
    models = [
        captured(job, source, cost_model, micro_batch=size, seq_len=seq_len, bench=bench)
        for size in resolved.captured_sizes
    ]
    clock.lap("capture")
    return PreparedJob(
        job=job,
        source=source,
        resolved=resolved,
        models=models,
        cluster=cluster,
        cost_model=cost_model,
        defaults=defaults | dict(resolved.defaults) | _assumed(job),
        timings_s=clock.laps_s,
        kernels=kernels,
        bench=bench,
    )


def compile_job(job: Job, *, on_pass: Callable[[str, str], None] | None = None) -> CompiledJob:
    """Return the plan of a job.

    Args:
        job: what to compile.
        on_pass: called with (name, text of the graph) after every directive and pass.
    Raises: ModelError, StrategyError, JobError, CostModelError for what does not go together.
    """
    prepared = prepare(job)
    clock = Clock()
    plan = prepared.plan(on_pass=on_pass)
    clock.lap("compile")
    return prepared.compiled(plan, timings_s=clock.laps_s)


def compile_resolved(
    resolved: Resolved,
    models: list[CapturedModel],
    job: Job,
    *,
    on_pass: Callable[[str, str], None] | None = None,
    verified: bool = True,
    notices: tuple[str, ...] = (),
    bench: Workbench | None = None,
) -> Plan:
    """Return the plan of a resolved strategy over a model captured at each microbatch size.

    Args:
        resolved: the strategy.
        models: at each of its `captured_sizes`.
        job: the training around it.
        on_pass, verified: of `compile_graph`.
        notices: what the plan should say of the model.
        bench: keeps graphs for jobs that differ from this one in the number of microbatches only.
    """
    stages, directives = complete(resolved, models[0])
    habits = resolved.habits
    states, overlap = habits.states(job.dtype, optimizer=job.optimizer), habits.gathers_overlap is True
    copied = habits.gradient_copy is True and resolved.pp == 1
    kept = habits.factor(resolved.pp), (habits.framework_mb or 0) * 2**20, copied
    summed = habits.sums_in_products is True
    said = (*notices, *models[0].notices, *resolved.notices, *_unused(models[0]))
    strategy = str(resolved.shorthand)

    def rewrite() -> CompiledGraph:
        graph = build_graph(
            models,
            stages,
            replica_batch=resolved.replica_batch,
            dtype=job.dtype,
            optimizer=job.optimizer,
            clip_grad_norm=job.clip_grad_norm,
            states=states,
            gathers_overlap=overlap,
            activation_factor=kept[0],
            framework_bytes=kept[1],
            gradients_copied=kept[2],
            sums_in_products=summed,
        )
        return rewritten(
            graph, directives, strategy=strategy, notices=said, on_pass=on_pass, verified=verified
        )

    if bench is None or on_pass is not None or not takes_other_counts(resolved):
        return rewrite().plan()
    key = (
        # A graph that is kept keeps its models, so that no other ones have their ids.
        *(id(model) for model in models), stages, *(d for d in directives if not isinstance(d, Order)),
        resolved.schedule, strategy, job.dtype, job.optimizer, job.clip_grad_norm, states, overlap,
        kept, summed,
    )  # fmt: skip
    graph = bench.once("graph", key, rewrite)
    return graph.with_batch(resolved.sizes, directives=directives, notices=said)


def _unused(model: CapturedModel) -> tuple[str, ...]:
    """Say which parameters no operation uses: they are counted, but neither placed nor trained."""
    used = {name for segment in model.segments for name in segment.parameters}
    names = [p.name for p in model.parameters if p.name not in used]
    if not names:
        return ()
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (f"forward never uses the parameter {names[0]}{more}: counted, but neither stored nor trained",)


def predict(
    job: Job,
    *,
    steps: int | str = "auto",
    engine: str = "auto",
    jitter: Jitter | None = None,
    microbatches: str = "all",
    tolerance: float = TOLERANCE,
    verified: bool = True,
    bench: Workbench | None = None,
) -> Prediction:
    """Compile and simulate a job; `result` has every key of the contract, and `jitter` if that is given.

    Args:
        job: what to predict.
        steps, engine: as `simulator.simulate` takes them.
        jitter: how ranks differ.
        microbatches: "all", or "auto": where a job repeats itself, plan and timeline are those of a job with
            fewer microbatches, and `result` (which says so) is that of the whole job (`piper.shortened`).
        tolerance: largest error of the step time that this may make, relative.
        verified: check our invariants while the job is compiled.
        bench: what this prediction shares with others.
    """
    require_known(microbatches, ["all", "auto"], where="predict", field="microbatches", error=JobError)
    clauses = _clauses(jitter)
    prepared = prepare(job, bench=bench)
    if microbatches == "auto" and jitter is None:
        short = simulate_short(
            prepared.resolved,
            lambda count: prepared.plan(microbatches=count, verified=verified),
            prepared.cost_model,
            steps=steps,
            engine=engine,
            convention=job.mfu_convention,
            tolerance=tolerance,
        )
        if short is not None:
            compiled = prepared.compiled(short.plan, timings_s={})
            return _prediction(compiled, short.timeline, short.result)
    clock = Clock()
    plan = prepared.plan(verified=verified)
    clock.lap("compile")
    compiled = prepared.compiled(plan, timings_s=clock.laps_s)
    options: dict[str, Any] = {"steps": steps, "engine": engine, "convention": job.mfu_convention}
    options |= {"jitter": jitter, "clauses": clauses, "gpus_per_node": compiled.cluster.gpus_per_node}
    timeline, result = _simulate(plan, compiled.cost_model, **options)
    return _prediction(compiled, timeline, result)


def _prediction(compiled: CompiledJob, timeline: Timeline, result: dict[str, Any]) -> Prediction:
    cut = [
        sum(1 for s in compiled.plan.segments if s.stage == stage)
        for stage in range(_num_stages(compiled.plan))
    ]
    result |= {
        "cluster": compiled.cluster.name,
        "stack": compiled.job.stack,
        "defaults": compiled.defaults,
        "segments_per_stage": cut,
        "timings_s": compiled.timings_s | result["timings_s"],
    }
    return Prediction(compiled=compiled, timeline=timeline, result=_ordered(result))


def predict_plan(
    plan: Plan,
    *,
    cluster: str = "dgx-h100",
    stack: str = "piper",
    settings: Settings = (),
    mfu_convention: str = "palm",
    steps: int | str = "auto",
    engine: str = "auto",
    jitter: Jitter | None = None,
    cores: float | None = None,
) -> Prediction:
    """Simulate a plan that was compiled before; `cores`: of the host, instead of those of its cluster."""
    clauses = _clauses(jitter)
    machine, cost_model = load_hardware(cluster, stack, settings=settings, cores=cores)
    require_cluster_holds(machine, plan.num_ranks)
    _check_convention(mfu_convention)
    options: dict[str, Any] = {"steps": steps, "engine": engine, "convention": mfu_convention}
    options |= {"jitter": jitter, "clauses": clauses, "gpus_per_node": machine.gpus_per_node}
    timeline, result = _simulate(plan, cost_model, **options)
    result |= {"cluster": machine.name, "stack": stack, "defaults": {"cluster": machine.name}}
    return Prediction(compiled=None, timeline=timeline, result=_ordered(result))


def load_hardware(
    cluster: str,
    stack: str,
    *,
    recipe: str | None = None,
    settings: Settings = (),
    cores: float | None = None,
) -> tuple[Cluster, ClusterCostModel]:
    """Return a cluster and the prices on it.

    A recipe and settings change the stack (`piper.recipe`); `cores` replaces those of the host.
    """
    from cost_models import cluster_cost_model, load_cluster
    from piper.recipe import stack_of

    machine = load_cluster(cluster)
    if cores is not None:
        machine = replace(machine, host=replace(machine.host, cores=cores))
    return machine, cluster_cost_model(machine, stack=stack_of(stack, recipe=recipe, settings=settings))


def require_cluster_holds(cluster: Cluster, gpus: int) -> None:
    """Raise JobError when a cluster has fewer devices than the job."""
    if cluster.max_nodes is not None and gpus > cluster.max_nodes * cluster.gpus_per_node:
        limit = cluster.max_nodes * cluster.gpus_per_node
        raise JobError(
            where="--gpus", field="gpus", value=gpus,
            rule=f"is more than the {limit} that {cluster.name} has (max_nodes = {cluster.max_nodes})",
            fix=f"use at most {limit}, or a cluster without max_nodes",
        )  # fmt: skip


def _clauses(jitter: Jitter | None) -> tuple[Clause, ...]:
    """Read the jitter before the work begins."""
    if jitter is None:
        return ()
    from simulator.jitter import parse_jitter

    return parse_jitter(jitter.spec)


def _simulate(
    plan: Plan,
    cost_model: CostModel,
    *,
    steps: int | str,
    engine: str,
    convention: str,
    jitter: Jitter | None,
    clauses: tuple[Clause, ...],
    gpus_per_node: int,
) -> tuple[Timeline, dict[str, Any]]:
    from simulator import build_workload, simulate, summarize

    clock = Clock()
    workload = build_workload(plan, cost_model)
    clock.lap("price")
    section = {}
    if jitter is None:
        timeline = simulate(plan, cost_model, steps=steps, engine=engine, workload=workload)
    else:
        from simulator.jitter import Sampling, section_of, study, timeline_of

        sampling = Sampling(seed=jitter.seed, runs=jitter.runs, steps=steps, engine=engine)
        found = study(
            plan,
            workload,
            clauses,
            gpus_per_node=gpus_per_node,
            sampling=sampling,
            cost_model=cost_model,
            report=jitter.report,
        )
        timeline, section = timeline_of(plan, workload, found), {"jitter": section_of(found)}
    clock.lap("simulate")
    result = summarize(plan, timeline, cost_model, workload=workload, convention=convention)
    clock.lap("summarize")
    return timeline, result | section | {"timings_s": clock.laps_s}


def _check_options(job: Job) -> None:
    for name in ("gpus", "seq_len", "global_batch", "micro_batch"):
        value = getattr(job, name)
        if value is not None:
            option = "--" + name.replace("_", "-")
            require_positive_int(
                value, where=option, field=name, fix=f"give a number such as {option} 8", error=JobError
            )
    _check_choice("dtype", job.dtype, known=DTYPES, later=())
    _check_choice("optimizer", job.optimizer, known=OPTIMIZERS, later=LATER_OPTIMIZERS)
    _check_convention(job.mfu_convention)
    if job.clip_grad_norm is not None:
        require_positive(
            job.clip_grad_norm, where="--clip-grad-norm", field="clip_grad_norm",
            fix="give the largest norm, such as 1.0, or none", error=JobError,
        )  # fmt: skip


def _check_convention(name: str) -> None:
    from simulator.conventions import CONVENTIONS

    require_known(name, list(CONVENTIONS), where="--mfu-convention", field="mfu_convention", error=JobError)


def _check_choice(name: str, value: str, *, known: tuple[str, ...], later: tuple[str, ...]) -> None:
    if value in known:
        return
    raise JobError(
        where=f"--{name}", field=name, value=value,
        rule="is not available in this version" if value in later else "is not known",
        fix=f"available: {', '.join(known)}" if value in later else nearest(str(value), known),
    )  # fmt: skip


def seq_len_of(job: Job, source: ModelSource) -> int:
    """Return the sequence length of a job; raises JobError where the model has no default."""
    if job.seq_len is not None:
        return job.seq_len
    if source.default_seq_len is None:
        raise JobError(
            where="--seq-len", field="seq_len", value=None, rule="must be given for a model from a factory",
            fix="give the tokens per sequence, such as --seq-len 2048",
        )  # fmt: skip

    return source.default_seq_len


def captured(
    job: Job,
    source: ModelSource,
    cost_model: ClusterCostModel,
    *,
    micro_batch: int,
    seq_len: int,
    bench: Workbench,
) -> CapturedModel:
    """Return the model of a job at one microbatch size, for the kernels of its stack, recipe and device.

    Raises: CostModelError for a low precision that the device has no peak for.
    """
    from piper.capture import capture
    from piper.capture.low_precision import in_low_precision
    from piper.recipe import kernels_of

    kernels = kernels_of(cost_model, recipe=job.recipe, settings=job.settings)
    low = job.dtype in OPERAND_BITS
    if low:
        cost_model.cluster.gpu.peak(job.dtype)

    def make() -> CapturedModel:
        dtype = kept_dtype(job.dtype)
        model = capture(
            source.written_for(kernels),
            micro_batch=micro_batch,
            seq_len=seq_len,
            dtype=dtype,
            kernels=kernels,
        )
        return in_low_precision(model, job.dtype) if low else model

    return bench.once("capture", (job.model, micro_batch, seq_len, job.dtype, kernels), make)


def _assumed(job: Job) -> dict[str, object]:
    """Return options that still have the default of `Job`."""
    fresh = Job(model=job.model)
    names = ("cluster", "dtype", "optimizer", "clip_grad_norm", "stack")
    same = {name: getattr(job, name) for name in names if getattr(job, name) == getattr(fresh, name)}
    convention = {"mfu_convention": job.mfu_convention} if job.mfu_convention == fresh.mfu_convention else {}
    return same | {"parameter_bytes": DTYPE_BYTES[kept_dtype(job.dtype)]} | convention


def _num_stages(plan: Plan) -> int:
    return max(segment.stage for segment in plan.segments) + 1


def _ordered(result: dict[str, Any]) -> dict[str, Any]:
    first = ("model", "n_parameters", "cluster", "n_gpus", "strategy", "schedule", "stack", "defaults")
    head = {"schema_version": SCHEMA_VERSION} | {key: result[key] for key in first}
    return head | {key: value for key, value in result.items() if key not in head}

"""Small plans built by hand and a cost model in whole nanoseconds, for tests of the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cost_models.ops import Operation, OpKind
from cost_models.price import CollectiveKind, Price, Provenance
from simulator.plan import (
    NONE,
    Bucket,
    BufferTable,
    DevicePlan,
    Edge,
    Group,
    MemoryClass,
    Mesh,
    ModelFacts,
    Plan,
    StateDtypes,
    Task,
    TaskKind,
    TaskTable,
    TrainingFacts,
    Work,
)

Slot = tuple[TaskKind, int]
K = TaskKind


def exact_price(time_ns: int, *, provenance: Provenance = Provenance.MEASURED, band: float = 0.0) -> Price:
    seconds = time_ns / 1e9
    low, high = seconds * (1 - band), seconds * (1 + band)
    return Price(seconds=seconds, low_s=low, high_s=high, provenance=provenance)


@dataclass(kw_only=True)
class FakeCostModel:
    """Nanoseconds by operation name ("7" means 7 ns), transfers by size, collectives by kind and size.

    `distinct_sets` says which sets of ranks lie differently; by default all do.
    """

    name: str = "fake"
    launch_ns: int = 0
    run_ahead_kernels: int | None = None
    blocking: tuple[str, ...] = ()
    awaited: tuple[str, ...] = ()
    eager_limit_bytes: int = 0
    transfer_ns: Callable[[int, int, int], int] = lambda size, source, target: 0
    collective_ns: Callable[[CollectiveKind, int, Sequence[int]], int] = lambda kind, size, ranks: 0
    host_copy_ns: Callable[[int], int] = lambda size: 0
    distinct_sets: Callable[[Sequence[Sequence[int]]], Sequence[Sequence[int]]] = lambda members: members
    device_memory_bytes: int = 1 << 40
    context_bytes: int = 0
    expandable_segments: bool = False
    bytes_per_communicator: int = 0
    peaks: dict[str, float] = field(default_factory=lambda: {"bf16": 1e30})
    band: float = 0.0
    asked: list[tuple[object, ...]] = field(default_factory=list)

    @property
    def launch_overhead_s(self) -> float:
        return self.launch_ns / 1e9

    @property
    def communication_overhead_s(self) -> float:
        return self.launch_overhead_s

    pass_wait_s = 0.0
    step_wait_s = 0.0
    step_error = None

    @property
    def pass_overhead(self) -> Price:
        return exact_price(0)

    @property
    def peak_flops_per_s(self) -> dict[str, float]:
        return self.peaks

    def communicator_bytes(self, num_ranks: int) -> int:
        return 0 if num_ranks == 1 else self.bytes_per_communicator

    def operation(self, operation: Operation) -> Price:
        self.asked.append(("operation", operation.name))
        return exact_price(int(operation.name), band=self.band)

    def transfer(self, *, size_bytes: int, source_rank: int, target_rank: int) -> Price:
        self.asked.append(("transfer", size_bytes, source_rank, target_rank))
        time_ns = self.transfer_ns(size_bytes, source_rank, target_rank)
        return exact_price(time_ns, provenance=Provenance.DATASHEET, band=self.band)

    def collective(self, kind: CollectiveKind, *, size_bytes: int, ranks: Sequence[int]) -> Price:
        self.asked.append(("collective", kind, size_bytes, tuple(ranks)))
        time_ns = self.collective_ns(kind, size_bytes, ranks)
        return exact_price(time_ns, provenance=Provenance.FITTED, band=self.band)

    def host_copy(self, *, size_bytes: int) -> Price:
        self.asked.append(("host_copy", size_bytes))
        return exact_price(self.host_copy_ns(size_bytes), provenance=Provenance.DATASHEET, band=self.band)

    def distinct(self, members: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        return self.distinct_sets(members)

    def machine(self, num_ranks: int) -> None:
        return None


def fixed(time_ns: int, *, kernels: int = 1, flops: int = 0) -> Work:
    """Return a work of `kernels` kernels that last `time_ns` each."""
    name = str(time_ns)
    operation = Operation(
        kind=OpKind.FIXED, name=name, shape=(), dtype="bf16", flops=flops, bytes=0, count=kernels
    )
    return Work(label=f"{kernels} x {name} ns", operations=(operation,))


class DeviceBuilder:
    """Collects the tasks of one device plan; tasks, streams and buffers are referred to by name."""

    def __init__(self, plan: PlanBuilder, pipeline_rank: int) -> None:
        self._plan = plan
        self.pipeline_rank = pipeline_rank
        self.stages: tuple[int, ...] = (pipeline_rank,)
        self.streams = ["compute"]
        self.tasks: list[Task] = []
        self.names: dict[str, int] = {}
        self.later: list[tuple[int, tuple[str, ...]]] = []
        self.buffers: dict[str, tuple[int, MemoryClass, bool]] = {}
        self.buckets: list[Bucket] = []

    def buffer(
        self, name: str, size: int, kind: MemoryClass = MemoryClass.ACTIVATIONS, *, persistent: bool = False
    ) -> str:
        self.buffers[name] = (size, kind, persistent)
        return name

    def bucket(self, name: str, **fields: object) -> int:
        values = {
            "stage": self.pipeline_rank, "kind": "dense", "parameters": (), "numel": 1, "padded_numel": 1,
            "shard_count": 1, "group": NONE, "zero": 0,
        }  # fmt: skip
        self.buckets.append(Bucket(name=name, **(values | fields)))
        return len(self.buckets) - 1

    def compute(self, name: str, time_ns: int, kind: TaskKind = K.F, **fields: object) -> None:
        kernels, flops = fields.pop("kernels", 1), fields.pop("flops", 0)
        work = self._plan.work(fixed(time_ns, kernels=kernels, flops=flops))
        self.task(name, kind, "compute", work=work, **fields)

    def task(self, name: str, kind: TaskKind, stream: str, **fields: object) -> None:
        waits, previous = fields.pop("waits", ()), fields.pop("previous_step_waits", ())
        buffers = list(self.buffers)
        for column in ("allocates", "reads", "frees"):
            fields[column] = tuple(buffers.index(buffer) for buffer in fields.get(column, ()))
        if stream not in self.streams:
            self.streams.append(stream)
        self.names[name] = len(self.tasks)
        self.later.append((len(self.tasks), tuple(previous)))
        task = Task(
            kind=kind,
            stream=self.streams.index(stream),
            waits=tuple(self.names[wait] for wait in waits),
            **({"stage": self.pipeline_rank} | fields),
        )
        self.tasks.append(task)

    def wait_later(self, name: str, for_whom: str) -> None:
        """Let `name` wait for a task that is dispatched after it (plans that hang)."""
        task = self.tasks[self.names[name]]
        waits = (*task.waits, self.names[for_whom])
        fields = {column: getattr(task, column) for column in Task.__slots__}
        self.tasks[self.names[name]] = Task(**(fields | {"waits": waits}))

    def build(self) -> DevicePlan:
        tasks = list(self.tasks)
        for index, previous in self.later:
            fields = {column: getattr(tasks[index], column) for column in Task.__slots__}
            found = tuple(self.names[name] for name in previous)
            tasks[index] = Task(**(fields | {"previous_step_waits": found}))
        table = list(self.buffers.values())
        return DevicePlan(
            pipeline_rank=self.pipeline_rank,
            stages=self.stages,
            streams=tuple(self.streams),
            buffers=BufferTable.of(
                size_bytes=[size for size, _, _ in table],
                memory_class=[kind for _, kind, _ in table],
                persistent=[persistent for _, _, persistent in table],
                owners=tuple(self.buffers),
            ),
            buckets=tuple(self.buckets),
            tasks=TaskTable.from_tasks(tasks),
        )


class PlanBuilder:
    """Collects device plans, works, edges and groups."""

    def __init__(self, *, pipeline_ranks: int = 1, replicas: int = 1, tp: int = 1, **facts: object) -> None:
        self.mesh = Mesh(axes=(("tp", tp), ("dp", replicas), ("pp", pipeline_ranks)))
        self.works: list[Work] = []
        self.groups: list[Group] = []
        self.devices = [DeviceBuilder(self, rank) for rank in range(pipeline_ranks)]
        self.facts = facts

    def work(self, work: Work) -> int:
        if work not in self.works:
            self.works.append(work)
        return self.works.index(work)

    def group(self, name: str, axis: str, pipeline_ranks: Sequence[int]) -> int:
        """Add a group.

        "dp": the replicas of one pipeline rank, or everybody ("world"); "tp": the ranks that share a replica;
        else one set per replica over the pipeline ranks.
        """
        if axis == "tp":
            members = tuple(
                self.mesh.ranks(pp=p, dp=replica)
                for p in pipeline_ranks
                for replica in range(self.mesh.size("dp"))
            )
        elif axis == "dp" and len(pipeline_ranks) == 1:
            members = tuple(
                self.mesh.ranks(pp=pipeline_ranks[0], tp=shard) for shard in range(self.mesh.size("tp"))
            )
        elif axis == "dp":
            members = (tuple(r for p in pipeline_ranks for r in self.mesh.ranks(pp=p)),)
        else:
            members = tuple(zip(*(self.mesh.ranks(pp=p) for p in pipeline_ranks), strict=True))
        group = Group(name=name, axis=axis, pipeline_ranks=tuple(pipeline_ranks), members=members)
        self.groups.append(group)
        return len(self.groups) - 1

    def transfer(self, source: int, target: int, *, kind: TaskKind = K.SEND_F, **fields: object) -> None:
        """Append a send and its receive; `sent_after` and `received_after` name waits at both ends."""
        down = kind == K.SEND_F
        stages = (source, target) if down else (target, source)
        shared = {
            "edge": min(stages), "size_bytes": fields.get("size_bytes", 1),
            "microbatch": fields.get("microbatch", 0),
        }  # fmt: skip
        name = fields.get("name", "x")
        self.devices[source].task(
            f"send {name}", kind, f"send>{target}", peer=target, waits=fields.get("sent_after", ()), **shared
        )
        recv = K.RECV_F if down else K.RECV_B
        self.devices[target].task(
            f"recv {name}", recv, f"recv<{source}", peer=source,
            waits=fields.get("received_after", ()), **shared,
        )  # fmt: skip

    def build(self) -> Plan:
        stages = len(self.devices)
        facts = {"tokens": 8, "n_active_parameters": 0, "clip": None} | self.facts
        return Plan(
            strategy=f"pp={stages}",
            directives=(),
            schedule="by hand",
            model=ModelFacts(
                name="none", n_parameters=facts["n_active_parameters"],
                n_active_parameters=facts["n_active_parameters"], layers=2, hidden=4, heads=2, head_dim=2,
                vocabulary=8,
            ),
            training=TrainingFacts(
                seq_len=8, global_batch=self.mesh.size("dp"), micro_batch_sizes=(1,), dtype="bf16",
                optimizer="sgd", clip_grad_norm=facts["clip"], states=StateDtypes.of("bf16"),
            ),
            mesh=self.mesh,
            parameters=(),
            segments=(),
            edges=tuple(
                Edge(source_stage=s, target_stage=s + 1, values=((s, 0),), grad_values=((s, 0),))
                for s in range(stages - 1)
            ),
            works=tuple(self.works),
            groups=tuple(self.groups),
            device_plans=tuple(device.build() for device in self.devices),
        )  # fmt: skip


def gpipe_rows(p: int, m: int) -> list[list[Slot]]:
    return [[*((K.F, i) for i in range(m)), *((K.B, i) for i in range(m))] for _ in range(p)]


def one_f_one_b_rows(p: int, m: int) -> list[list[Slot]]:
    rows = []
    for rank in range(p):
        warm = min(p - rank - 1, m)
        row: list[Slot] = [(K.F, i) for i in range(warm)]
        for i in range(m - warm):
            row += [(K.F, warm + i), (K.B, i)]
        rows.append(row + [(K.B, i) for i in range(m - warm, m)])
    return rows


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Nanoseconds and bytes of the tasks of `pipeline_plan`."""

    forward_ns: int = 1
    backward_ns: int = 1
    update_ns: int = 0
    message_bytes: int = 1
    activation_bytes: int = 10
    parameter_bytes: int = 100


def pipeline_plan(
    rows: Sequence[Sequence[Slot]], *, costs: Costs | None = None, replicas: int = 1, clip: bool = False
) -> Plan:
    """Return a plan that runs one stage per pipeline rank in the order of `rows`, ZeRO 0, one bucket.

    Receives are gated on the slot two before their consumer and dispatched one slot early.
    """
    costs = costs or Costs()
    builder = PlanBuilder(
        pipeline_ranks=len(rows), replicas=replicas, n_active_parameters=1, clip=1.0 if clip else None
    )
    world = builder.group("world", "dp", range(len(rows))) if clip else NONE
    for rank, row in enumerate(rows):
        _static(builder.devices[rank], costs)
        for slot in range(len(row)):
            if slot == 0:
                _receive(builder, rank, row, 0)
            if slot + 1 < len(row):
                _receive(builder, rank, row, slot + 1)
            _slot(builder, rank, row[slot], costs)
        _end_of_step(builder, rank, costs, world=world)
    return builder.build()


def _static(device: DeviceBuilder, costs: Costs) -> None:
    device.buffer("parameters", costs.parameter_bytes, MemoryClass.PARAMETERS, persistent=True)
    device.buffer("gradients", 2 * costs.parameter_bytes, MemoryClass.GRADIENTS, persistent=True)
    device.bucket("dense0")


def _source(rank: int, kind: TaskKind, stages: int) -> int | None:
    source = rank - 1 if kind == K.F else rank + 1
    return source if 0 <= source < stages else None


def _receive(builder: PlanBuilder, rank: int, row: Sequence[Slot], slot: int) -> None:
    kind, microbatch = row[slot]
    source = _source(rank, kind, len(builder.devices))
    if source is None:
        return
    gate = [f"{row[slot - 2][0].name}{row[slot - 2][1]}"] if slot >= 2 else []
    builder.devices[rank].task(
        f"recv {kind.name}{microbatch}", K.RECV_F if kind == K.F else K.RECV_B, f"recv<{source}",
        peer=source, edge=min(source, rank), microbatch=microbatch, size_bytes=1, waits=gate,
    )  # fmt: skip


def _slot(builder: PlanBuilder, rank: int, slot: Slot, costs: Costs) -> None:
    kind, microbatch = slot
    device = builder.devices[rank]
    name = f"{kind.name}{microbatch}"
    waits = [f"recv {name}"] if f"recv {name}" in device.names else []
    forward = kind == K.F
    time_ns = costs.forward_ns if forward else costs.backward_ns
    kept = f"activations {microbatch}"
    if forward:
        device.buffer(kept, costs.activation_bytes)
    device.compute(
        name, time_ns, kind, microbatch=microbatch, waits=waits,
        allocates=[kept] if forward else [], frees=[] if forward else [kept],
        previous_step_waits=["update"] if forward else [],
    )  # fmt: skip
    target = rank + 1 if forward else rank - 1
    if 0 <= target < len(builder.devices):
        device.task(
            f"send {name}", K.SEND_F if forward else K.SEND_B, f"send>{target}", peer=target,
            edge=min(target, rank), microbatch=microbatch, size_bytes=costs.message_bytes, waits=[name],
        )  # fmt: skip


def _end_of_step(builder: PlanBuilder, rank: int, costs: Costs, *, world: int) -> None:
    device = builder.devices[rank]
    waits: list[str] = []
    replicas = builder.mesh.size("dp")
    if replicas > 1:
        group = builder.group(f"dp{rank}", "dp", [rank])
        device.task("reduce", K.ALL_REDUCE, "dp", group=group, bucket=0, size_bytes=64, waits=_last(device))
        waits = ["reduce"]
    if world != NONE:
        device.compute("norm", costs.update_ns, K.NORM, stage=NONE, waits=waits)
        device.task(
            "norms", K.ALL_REDUCE, "dp", stage=NONE, group=world, bucket=NONE, size_bytes=4, waits=["norm"]
        )
        waits = ["norms"]
    device.compute("update", costs.update_ns, K.UPDATE, bucket=0, waits=waits)


def _last(device: DeviceBuilder) -> list[str]:
    return [next(name for name in reversed(device.names) if name.startswith("B"))]

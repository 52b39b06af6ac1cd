"""Legal plans of every piece, built by hand, and ways to rebuild them with one thing changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from cost_models.ops import Operation, OpKind
from simulator.plan import (
    Bucket,
    BufferTable,
    DevicePlan,
    Edge,
    Group,
    MemoryClass,
    Mesh,
    ModelFacts,
    Parameter,
    Plan,
    Segment,
    StateDtypes,
    Task,
    TaskKind,
    TaskTable,
    TensorSpec,
    TrainingFacts,
    Work,
)

DP = 2
HIDDEN = TensorSpec(shape=(2, 8, 4), dtype="fp32")
MESSAGE_BYTES = 2 * 8 * 4 * 4
STATIC_BYTES = 1024


def one_f_one_b_slots(rank: int, ranks: int, microbatches: int) -> list[tuple[TaskKind, int]]:
    warm_up = min(microbatches, ranks - rank)
    slots = [(TaskKind.F, m) for m in range(warm_up)]
    for m in range(microbatches):
        slots.append((TaskKind.B, m))
        if warm_up + m < microbatches:
            slots.append((TaskKind.F, warm_up + m))
    return slots


def pipeline_plan(ranks: int = 2, microbatches: int = 4, *, clip: bool = True, tied: bool = True) -> Plan:
    """1F1B x 2 replicas, ZeRO 1, clipping, an embedding tied to the head, a frozen parameter."""
    segments = _segments(ranks, tied=tied)
    groups = [
        Group(name=f"dp{r}", axis="dp", pipeline_ranks=(r,), members=((DP * r, DP * r + 1),))
        for r in range(ranks)
    ]
    ends = tuple(sorted({0, ranks - 1}))
    pairs = tuple(tuple(DP * rank + replica for rank in ends) for replica in range(DP))
    groups.append(Group(name="tied0", axis="pp", pipeline_ranks=ends, members=pairs))
    every = tuple(range(DP * ranks))
    groups.append(Group(name="world", axis="dp", pipeline_ranks=tuple(range(ranks)), members=(every,)))
    return Plan(
        strategy=f"pp={ranks},dp={DP},zero=1,schedule=1f1b",
        directives=({"op": "order", "schedule": "1f1b"}, {"op": "split", "num_microbatches": microbatches}),
        schedule="1f1b",
        model=ModelFacts(
            name="hand-built", n_parameters=100, n_active_parameters=100, layers=ranks, hidden=4, heads=1,
            head_dim=4, vocabulary=16,
        ),
        training=TrainingFacts(
            seq_len=8, global_batch=2 * DP * microbatches, micro_batch_sizes=(2,) * microbatches,
            dtype="fp32", optimizer="adamw", clip_grad_norm=1.0 if clip else None,
            states=StateDtypes.of("fp32"),
        ),
        mesh=Mesh(axes=(("tp", 1), ("cp", 1), ("dp", DP), ("pp", ranks))),
        parameters=(
            *(Parameter(name=f"layers.{r}.w", shape=(4, 4)) for r in range(ranks)),
            Parameter(name="embedding.w", shape=(16, 4)),
            Parameter(name="head.w", shape=(16, 4)),
            Parameter(name="frozen.w", shape=(4,), trainable=False),
        ),
        segments=segments,
        edges=tuple(
            Edge(source_stage=r, target_stage=r + 1, values=((2 * r + 1, 0),), grad_values=((2 * r + 1, 0),))
            for r in range(ranks - 1)
        ),
        works=tuple(
            Work(label=label, operations=(_operation(label),)) for label in ("F", "B", "NORM", "UPDATE")
        ),
        groups=tuple(groups),
        device_plans=tuple(
            _device(r, ranks, microbatches, clip=clip, tied=tied) for r in range(ranks)
        ),
        notices=("built by hand",),
    )  # fmt: skip


def tasks_of(plan: Plan, rank: int) -> list[Task]:
    return list(plan.device_plans[rank].tasks)


def find(plan: Plan, rank: int, code: str) -> int:
    return plan.device_plans[rank].codes().index(code)


def with_tasks(plan: Plan, rank: int, tasks: list[Task]) -> Plan:
    devices = list(plan.device_plans)
    devices[rank] = replace(devices[rank], tasks=TaskTable.from_tasks(tasks))
    return replace(plan, device_plans=tuple(devices))


def change(plan: Plan, rank: int, code: str, *, edit: Callable[[Task], Task]) -> Plan:
    tasks = tasks_of(plan, rank)
    index = find(plan, rank, code)
    tasks[index] = edit(tasks[index])
    return with_tasks(plan, rank, tasks)


def drop(plan: Plan, rank: int, code: str) -> Plan:
    """Remove a task; those that waited for it wait for what it waited for."""
    gone = find(plan, rank, code)
    tasks = tasks_of(plan, rank)
    heirs = tasks[gone].waits
    order = [index for index in range(len(tasks)) if index != gone]
    for index in order:
        waits = tasks[index].waits
        if gone in waits:
            kept = dict.fromkeys(w for wait in waits for w in (heirs if wait == gone else (wait,)))
            tasks[index] = replace(tasks[index], waits=tuple(kept))
        past = tasks[index].previous_step_waits
        tasks[index] = replace(tasks[index], previous_step_waits=tuple(w for w in past if w != gone))
    return with_tasks(plan, rank, _renumbered(tasks, order))


def move(plan: Plan, rank: int, code: str, *, before: str) -> Plan:
    """Dispatch a task earlier or later; waits follow the tasks."""
    tasks = tasks_of(plan, rank)
    moved = find(plan, rank, code)
    order = [index for index in range(len(tasks)) if index != moved]
    order.insert(order.index(find(plan, rank, before)), moved)
    return with_tasks(plan, rank, _renumbered(tasks, order))


def repeat(plan: Plan, rank: int, code: str) -> Plan:
    """Run a task twice in a row (without its effects on buffers)."""
    tasks = tasks_of(plan, rank)
    index = find(plan, rank, code)
    twin = replace(tasks[index], allocates=(), frees=(), reads=())
    order = list(range(len(tasks)))
    order.insert(index + 1, len(tasks))
    return with_tasks(plan, rank, _renumbered([*tasks, twin], order))


def insert(plan: Plan, rank: int, task: Task, *, after: str, waits: tuple[str, ...] = ()) -> Plan:
    """Dispatch a further task; it waits for the tasks with these codes."""
    tasks = tasks_of(plan, rank)
    place = find(plan, rank, after)
    order = list(range(len(tasks)))
    order.insert(place + 1, len(tasks))
    task = replace(task, waits=tuple(find(plan, rank, code) for code in waits))
    return with_tasks(plan, rank, _renumbered([*tasks, task], order))


def _renumbered(tasks: list[Task], order: list[int]) -> list[Task]:
    position = {old: new for new, old in enumerate(order)}
    return [
        replace(
            tasks[index],
            waits=tuple(position[wait] for wait in tasks[index].waits),
            previous_step_waits=tuple(position[wait] for wait in tasks[index].previous_step_waits),
        )
        for index in order
    ]


def _operation(label: str) -> Operation:
    return Operation(kind=OpKind.FIXED, name=label, shape=(), dtype="fp32", flops=0, bytes=0)


def _segments(ranks: int, *, tied: bool) -> tuple[Segment, ...]:
    """Two segments per stage; the first holds the embedding, the last the head."""
    segments = []
    for index in range(2 * ranks):
        stage = index // 2
        names: tuple[str, ...] = (f"layers.{stage}.w",) if index % 2 == 0 else ()
        if index == 0:
            names = ("embedding.w", *names)
        if index == 2 * ranks - 1:
            names = ("embedding.w" if tied else "head.w", "frozen.w")
        segments.append(
            Segment(
                name=f"part{index}",
                tags=(("PP", index),),
                stage=stage,
                parameters=names,
                inputs=((index - 1, 0),),
                outputs=(HIDDEN,),
            )
        )
    return tuple(segments)


@dataclass
class _Builder:
    tasks: list[Task] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    classes: list[MemoryClass] = field(default_factory=list)
    persistent: list[bool] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)

    def buffer(self, owner: str, memory_class: MemoryClass, *, persistent: bool = False) -> int:
        self.sizes.append(STATIC_BYTES if persistent else MESSAGE_BYTES)
        self.classes.append(memory_class)
        self.persistent.append(persistent)
        self.owners.append(owner)
        return len(self.owners) - 1

    def task(self, kind: TaskKind, **fields: object) -> int:
        self.tasks.append(Task(kind=kind, **fields))  # type: ignore[arg-type]
        return len(self.tasks) - 1


def _device(rank: int, ranks: int, microbatches: int, *, clip: bool, tied: bool) -> DevicePlan:
    streams = ["compute"]
    for name, exists in (
        (f"send>{rank + 1}", rank < ranks - 1), (f"recv<{rank + 1}", rank < ranks - 1),
        (f"send>{rank - 1}", rank > 0), (f"recv<{rank - 1}", rank > 0), ("dp", True),
    ):  # fmt: skip
        if exists:
            streams.append(name)
    builder = _Builder()
    static = tuple(
        builder.buffer(name, cls, persistent=True)
        for name, cls in (("parameters", MemoryClass.PARAMETERS), ("gradients", MemoryClass.GRADIENTS))
    )
    builder.buffer("optimizer", MemoryClass.OPTIMIZER, persistent=True)
    slots = one_f_one_b_slots(rank, ranks, microbatches)
    _step(builder, slots, (rank, ranks), streams=streams, static=static)
    tying = tied and ranks > 1 and rank in {0, ranks - 1}
    buckets = _buckets(rank, ranks, tied=tied, tying=tying)
    _ending(builder, rank, ranks, stream=streams.index("dp"), tying=tying, clip=clip)
    return DevicePlan(
        pipeline_rank=rank,
        stages=(rank,),
        streams=tuple(streams),
        buffers=BufferTable.of(
            size_bytes=builder.sizes,
            memory_class=builder.classes,
            persistent=builder.persistent,
            owners=tuple(builder.owners),
        ),
        buckets=buckets,
        tasks=TaskTable.from_tasks(builder.tasks),
    )


def _buckets(rank: int, ranks: int, *, tied: bool, tying: bool) -> tuple[Bucket, ...]:
    names = [f"layers.{rank}.w"]
    if rank == 0:
        names.append("embedding.w")
    if rank == ranks - 1 and not (tied and rank == 0):
        names.append("embedding.w" if tied else "head.w")
    numel = 16 + 64 * (len(names) - 1)
    dense = Bucket(
        name="dense0", stage=rank, kind="dense", parameters=tuple(names), numel=numel, padded_numel=numel,
        shard_count=DP, group=rank, zero=1,
    )  # fmt: skip
    both = Bucket(
        name="tied0", stage=rank, kind="tied", parameters=("embedding.w",), numel=64, padded_numel=64,
        shard_count=1, group=ranks, zero=0,
    )  # fmt: skip
    return (dense, both) if tying else (dense,)


def _step(
    builder: _Builder,
    slots: list[tuple[TaskKind, int]],
    place: tuple[int, int],
    *,
    streams: list[str],
    static: tuple[int, ...],
) -> None:
    """Emit compute tasks, their receives one slot early (gated on two slots before), their sends after."""
    rank, ranks = place
    received: dict[int, tuple[int, int]] = {}
    compute: list[int] = []
    kept: dict[int, tuple[int, ...]] = {}

    def receive(number: int) -> None:
        if not number < len(slots):
            return
        kind, microbatch = slots[number]
        peer = rank - 1 if kind is TaskKind.F else rank + 1
        if not 0 <= peer < ranks:
            return
        recv_kind = TaskKind.RECV_F if kind is TaskKind.F else TaskKind.RECV_B
        buffer = builder.buffer(f"{recv_kind.name} of microbatch {microbatch}", MemoryClass.COMMUNICATION)
        received[number] = (
            builder.task(
                recv_kind, stage=rank, microbatch=microbatch, stream=streams.index(f"recv<{peer}"), peer=peer,
                edge=min(rank, peer), size_bytes=MESSAGE_BYTES, allocates=(buffer,),
                waits=(compute[number - 2],) if number >= 2 else (),
            ),
            buffer,
        )  # fmt: skip

    receive(0)
    for number, (kind, microbatch) in enumerate(slots):
        receive(number + 1)
        forward = kind is TaskKind.F
        peer = rank + 1 if forward else rank - 1
        waits, inputs = ((received[number][0],), (received[number][1],)) if number in received else ((), ())
        out = (
            (builder.buffer(f"{kind.name}{microbatch} result", MemoryClass.COMMUNICATION),)
            if 0 <= peer < ranks
            else ()
        )
        if forward:
            activation = builder.buffer(f"activations of microbatch {microbatch}", MemoryClass.ACTIVATIONS)
            kept[microbatch] = (activation, *inputs)
        compute.append(
            builder.task(
                kind, stage=rank, microbatch=microbatch, first_segment=2 * rank, last_segment=2 * rank + 1,
                work=0 if forward else 1, waits=waits, previous_step_waits=(),
                allocates=(*out, kept[microbatch][0]) if forward else out,
                reads=(*inputs, *static) if forward else (*inputs, *kept[microbatch], *static),
                frees=() if forward else (*inputs, *kept[microbatch]),
            )
        )  # fmt: skip
        if out:
            builder.task(
                TaskKind.SEND_F if forward else TaskKind.SEND_B, stage=rank, microbatch=microbatch,
                stream=streams.index(f"send>{peer}"), peer=peer, edge=min(rank, peer),
                size_bytes=MESSAGE_BYTES, waits=(compute[-1],), reads=out, frees=out,
            )  # fmt: skip


def _ending(builder: _Builder, rank: int, ranks: int, *, stream: int, tying: bool, clip: bool) -> None:
    last = max(i for i, task in enumerate(builder.tasks) if task.kind is TaskKind.B)
    first = next(i for i, task in enumerate(builder.tasks) if task.kind is TaskKind.F)
    if tying:
        last = builder.task(
            TaskKind.ALL_REDUCE,
            stage=rank,
            stream=stream,
            group=ranks,
            bucket=1,
            size_bytes=256,
            waits=(last,),
        )
    last = builder.task(
        TaskKind.REDUCE_SCATTER,
        stage=rank,
        stream=stream,
        group=rank,
        bucket=0,
        size_bytes=512,
        waits=(last,),
    )
    if clip:
        last = builder.task(TaskKind.NORM, work=2, waits=(last,))
        last = builder.task(TaskKind.ALL_REDUCE, stream=stream, group=ranks + 1, size_bytes=4, waits=(last,))
    last = builder.task(TaskKind.UPDATE, stage=rank, bucket=0, work=3, waits=(last,))
    gather = builder.task(
        TaskKind.ALL_GATHER, stage=rank, stream=stream, group=rank, bucket=0, size_bytes=512, waits=(last,)
    )
    builder.tasks[first] = replace(builder.tasks[first], previous_step_waits=(gather,))

"""Rows -> the plan of a model without parameters: one segment per stage, passes of fixed duration.

[Note: pure latency]
`comm` is the latency of an edge between ranks: however many transfers are on their way, none queues
behind another. A stream runs one transfer at a time, so each direction gets as many streams as transfers
can be in flight, and receives are posted at once.
[Note: overlapped slot]
The F and the B of a slot start together and end together after `FB`: they wait for the same tasks, one on
the compute stream, the other on a second one, and the next slot waits for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cost_models.ops import Operation, OpKind
from piper.errors import StrategyError
from piper.schedules.copies import Copies
from piper.schedules.rows import Rows, Slot
from simulator.plan import (
    BufferTable,
    DevicePlan,
    Edge,
    Mesh,
    ModelFacts,
    Plan,
    Segment,
    StateDtypes,
    Task,
    TaskKind,
    TaskName,
    TaskTable,
    TensorSpec,
    TrainingFacts,
    Work,
)
from simulator.plan.task import NONE

WORKS = ("F", "B", "BI", "BW", "FB")
"""Names of the fixed operations: the passes, and a slot in which an F and a B overlap."""


def preview_plan(
    rows: Rows,
    *,
    stages: Sequence[Sequence[int]],
    durations_ns: Mapping[str, int],
    copies: int = 1,
    where: str = "schedule",
) -> Plan:
    """Return the plan of a model without parameters: one segment per stage, fixed times by pass.

    Args:
        rows: a schedule that `validate_rows` accepts.
        stages: the stages of each pipeline rank.
        durations_ns: of F, B, BI, BW, FB and comm.
        copies: of the model among the stages; see [Note: copies].
        where: what the user gave, for errors.

    Raises: StrategyError for a slot that has no cost: anything but one pass, or one F with one B.
    """
    order = Copies(num_stages=sum(len(held) for held in stages), count=copies)
    stages_of_model = order.stages_of_a_copy
    num_microbatches = 1 + max(task.microbatch for row in rows for slot in row for task in slot)
    for rank, row in enumerate(rows):
        for number, slot in enumerate(row):
            _require_cost(slot, where=f"{where}: pipeline rank {rank} slot {number}")
    owner = {stage: rank for rank, held in enumerate(stages) for stage in held}
    shortest = min(durations_ns[name] for name in WORKS)
    lanes = 1 if durations_ns["comm"] == 0 else 2 * (-(-durations_ns["comm"] // shortest) + 1)
    sent = _sent_by_pair(rows, owner, order)
    emitters = [_Emitter(rank, order=order, owner=owner, lanes=lanes, sent=sent) for rank in range(len(rows))]
    return Plan(
        strategy=f"pp={len(rows)}",
        directives=(),
        schedule=where,
        model=ModelFacts(
            name="none", n_parameters=0, n_active_parameters=0, layers=stages_of_model, hidden=0, heads=0,
            head_dim=0, vocabulary=0,
        ),
        training=TrainingFacts(
            seq_len=1, global_batch=num_microbatches, micro_batch_sizes=(1,) * num_microbatches, dtype="fp32",
            optimizer="sgd", clip_grad_norm=None, states=StateDtypes.of("fp32"),
        ),
        mesh=Mesh(axes=(("pp", len(rows)),)),
        parameters=(),
        segments=tuple(_segment(stage) for stage in range(stages_of_model)),
        edges=tuple(
            Edge(source_stage=s, target_stage=s + 1, values=((s, 0),), grad_values=((s, 0),))
            for s in range(stages_of_model - 1)
        ),
        works=tuple(_work(name) for name in WORKS),
        groups=(),
        device_plans=tuple(
            emitter.device_plan(row, held) for emitter, row, held in zip(emitters, rows, stages, strict=True)
        ),
    )  # fmt: skip


Transfer = tuple[TaskKind, int, int]
"""Kind of send, the lower of its two virtual stages, microbatch."""
_RECEIVED_AS = {TaskKind.SEND_F: TaskKind.RECV_F, TaskKind.SEND_B: TaskKind.RECV_B}


def _sent_by_pair(
    rows: Rows, owner: Mapping[int, int], order: Copies
) -> dict[tuple[int, int], list[Transfer]]:
    """Return what each rank sends to each other one, in the order of the sender's row."""
    sent: dict[tuple[int, int], list[Transfer]] = {}
    for rank, row in enumerate(rows):
        for task in (task for slot in row for task in slot):
            goal = _goal(task, order)
            if goal != NONE and owner[goal] != rank:
                sent.setdefault((rank, owner[goal]), []).append(_sending(task))
    return sent


def _goal(task: TaskName, order: Copies) -> int:
    """Return the stage that needs the result of a pass, or NONE."""
    return NONE if task.kind is TaskKind.BW else order.goal(task.stage, forward=task.kind is TaskKind.F)


def _sending(task: TaskName) -> Transfer:
    forward = task.kind is TaskKind.F
    lower = task.stage if forward else task.stage - 1
    return TaskKind.SEND_F if forward else TaskKind.SEND_B, lower, task.microbatch


@dataclass(slots=True)
class _Emitter:
    """Emits the tasks of one pipeline rank in dispatch order; they name the stages of the model."""

    rank: int
    order: Copies
    owner: Mapping[int, int]
    lanes: int
    sent: Mapping[tuple[int, int], Sequence[Transfer]]
    tasks: list[Task] = field(default_factory=list)
    streams: dict[str, int] = field(default_factory=lambda: {"compute": 0})
    position: dict[tuple[TaskKind, int, int], int] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)

    def device_plan(self, row: Sequence[Slot], stages: Sequence[int]) -> DevicePlan:
        for (source, target), transfers in sorted(self.sent.items()):
            if target == self.rank:
                for number, transfer in enumerate(transfers):
                    self._receive(source, number, transfer)
        before: tuple[int, ...] = ()
        for slot in row:
            before = self._slot(slot, before)
        return DevicePlan(
            pipeline_rank=self.rank,
            stages=tuple(sorted({self._stage(stage) for stage in stages})),
            streams=tuple(self.streams),
            buffers=BufferTable.of(size_bytes=(), memory_class=(), persistent=(), owners=()),
            buckets=(),
            tasks=TaskTable.from_tasks(self.tasks),
        )

    def _emit(self, task: Task) -> int:
        """Add a task of a virtual stage."""
        self.position[task.kind, task.stage, task.microbatch] = len(self.tasks)
        self.tasks.append(replace(task, stage=self._stage(task.stage)))
        return len(self.tasks) - 1

    def _stage(self, virtual_stage: int) -> int:
        return self.order.copy_of(virtual_stage)[0]

    def _stream(self, name: str) -> int:
        return self.streams.setdefault(name, len(self.streams))

    def _lane(self, direction: str, number: int) -> int:
        return self._stream(direction if self.lanes == 1 else f"{direction}#{number % self.lanes}")

    def _receive(self, source: int, number: int, transfer: Transfer) -> None:
        sent_as, lower, microbatch = transfer
        kind = _RECEIVED_AS[sent_as]
        stage = lower + 1 if kind is TaskKind.RECV_F else lower
        edge = self._stage(lower)
        lane = self._lane(f"recv<{source}", number)
        self._emit(Task(kind=kind, stage=stage, microbatch=microbatch, stream=lane, peer=source, edge=edge))

    def _slot(self, slot: Slot, before: tuple[int, ...]) -> tuple[int, ...]:
        """Emit a slot after the slot before it, then its sends; see [Note: overlapped slot]."""
        waits = tuple(dict.fromkeys([*before, *(need for task in slot for need in self._needs(task))]))
        work = WORKS.index(slot[0].kind.name if len(slot) == 1 else "FB")
        emitted = tuple(
            self._emit(
                Task(
                    kind=task.kind,
                    stage=task.stage,
                    microbatch=task.microbatch,
                    first_segment=self._stage(task.stage),
                    last_segment=self._stage(task.stage),
                    stream=self._stream("overlap") if number else 0,
                    work=work,
                    waits=waits,
                )
            )
            for number, task in enumerate(slot)
        )
        for task, position in zip(slot, emitted, strict=True):
            self._send(task, position)
        return emitted

    def _needs(self, task: TaskName) -> list[int]:
        """Return the tasks of this rank whose results a pass needs, received ones included."""
        stage, microbatch = task.stage, task.microbatch
        if task.kind is TaskKind.BW:
            return [self.position[TaskKind.BI, stage, microbatch]]
        if task.kind is TaskKind.F:
            keys = [(TaskKind.RECV_F, stage, microbatch), (TaskKind.F, stage - 1, microbatch)]
        else:
            keys = [(TaskKind.F, stage, microbatch), (TaskKind.RECV_B, stage, microbatch)]
            keys += [(kind, stage + 1, microbatch) for kind in (TaskKind.B, TaskKind.BI)]
        return [self.position[key] for key in keys if key in self.position]

    def _send(self, task: TaskName, position: int) -> None:
        goal = _goal(task, self.order)
        if goal == NONE or self.owner[goal] == self.rank:
            return
        peer = self.owner[goal]
        number = self.counts.get(peer, 0)
        self.counts[peer] = number + 1
        kind, lower, microbatch = _sending(task)
        lane = self._lane(f"send>{peer}", number)
        self._emit(
            Task(
                kind=kind, stage=task.stage, microbatch=microbatch, stream=lane, peer=peer,
                edge=self._stage(lower), waits=(position,),
            )
        )  # fmt: skip


def _require_cost(slot: Slot, *, where: str) -> None:
    kinds = sorted(task.kind for task in slot)
    if len(slot) != 1 and kinds != [TaskKind.F, TaskKind.B]:
        raise StrategyError(
            where=where,
            field="slot",
            value=[task.code for task in slot],
            rule="has no cost: one F and one B can overlap",
            fix="put other passes into slots of their own",
        )


def _segment(stage: int) -> Segment:
    hidden = TensorSpec(shape=(0,), dtype="fp32")
    inputs = ((stage - 1, 0),)
    return Segment(
        name=f"stage{stage}",
        tags=(("PP", stage),),
        stage=stage,
        parameters=(),
        inputs=inputs,
        outputs=(hidden,),
    )


def _work(name: str) -> Work:
    operation = Operation(kind=OpKind.FIXED, name=name, shape=(), dtype="fp32", flops=0, bytes=0)
    return Work(label=name, operations=(operation,))

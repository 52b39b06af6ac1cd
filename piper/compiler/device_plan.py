"""Emission: the templates of one pipeline rank and its order row become a dispatch list.

[Note: receive gating]
A receive is dispatched one slot before the slot that needs it, and waits for the slot before that: it
overlaps with one slot of compute, and at most two receives of a kind hold memory. The receives of the
first two slots wait for the end of the step before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from cost_models.ops import DTYPE_BYTES
from piper.compiler.buffers import GRADIENT_BYTES, BufferBook, ComputeBuffers, add_static_buffers
from piper.compiler.memory import StageMemory
from piper.compiler.works import WorkTable
from piper.graph import EdgeKind, Graph, Node
from simulator.plan import (
    COLLECTIVE_KINDS,
    NONE,
    RECV_KINDS,
    SEND_KINDS,
    Bucket,
    DevicePlan,
    Task,
    TaskKind,
    TaskName,
    TaskTable,
)

COMPUTE_STREAM = 0


@dataclass(kw_only=True)
class DeviceEmitter:
    """Emit the plan of one pipeline rank; used once.

    Args:
        graph: after all passes.
        pipeline_rank: whose plan.
        works: price keys, shared by all ranks.
        groups: number of each rank group by name.
        order: uids of all nodes in topological order.
    """

    graph: Graph
    pipeline_rank: int
    works: WorkTable
    groups: dict[str, int]
    order: tuple[str, ...]

    _tasks: list[Task] = field(default_factory=list)
    _book: BufferBook = field(default_factory=BufferBook)
    _streams: dict[str, int] = field(default_factory=lambda: {"compute": COMPUTE_STREAM})
    _position: dict[tuple[str, int], int] = field(default_factory=dict)
    _stages: dict[tuple[int, int], ComputeBuffers] = field(default_factory=dict)
    _ungated: list[int] = field(default_factory=list)
    _last_compute: int = NONE

    def emit(self) -> DevicePlan:
        """Return the device plan."""
        add_static_buffers(self._book, self.graph, self.pipeline_rank)
        slots = self.graph.rows[self.pipeline_rank]
        self._receive(slots[0] if slots else ())
        for number, slot in enumerate(slots):
            self._receive(slots[number + 1] if number + 1 < len(slots) else ())
            for name in slot:
                self._compute(name)
            for name in slot:
                self._send(name)
        for node in self._step_end:
            self._finish(node)
        self._wait_for_previous_step()
        return DevicePlan(
            pipeline_rank=self.pipeline_rank,
            stages=self.graph.stages_of_rank(self.pipeline_rank),
            streams=tuple(self._streams),
            buffers=self._book.table(),
            buckets=tuple(self._numbered(bucket) for bucket in self._buckets),
            tasks=TaskTable.from_tasks(self._tasks),
        )

    def _receive(self, slot: Iterable[TaskName]) -> None:
        for name in slot:
            for node in self._transfers(name, RECV_KINDS):
                if self._last_compute == NONE:
                    self._ungated.append(len(self._tasks))
                size = self._message_bytes(node, name.microbatch)
                self._append(
                    node,
                    name.microbatch,
                    waits=() if self._last_compute == NONE else (self._last_compute,),
                    part=self._edge_part(node),
                    size_bytes=size,
                    allocates=self._stage(node, name.microbatch).of_receive(node, name.microbatch, size),
                )

    def _compute(self, name: TaskName) -> None:
        for node in self._chains[name.stage, name.kind]:
            buffers = self._stage(node, name.microbatch).of(node, name.microbatch)
            self._append(
                node,
                name.microbatch,
                part=node.first_segment if self._is_part(node) else NONE,
                work=self.works.of_compute(node, self.graph.micro_batch_sizes[name.microbatch]),
                allocates=buffers.allocates,
                reads=buffers.reads,
                frees=buffers.frees,
            )

    def _send(self, name: TaskName) -> None:
        for node in self._transfers(name, SEND_KINDS):
            buffers = self._stage(node, name.microbatch).of_send(node, name.microbatch)
            self._append(
                node,
                name.microbatch,
                part=self._edge_part(node),
                size_bytes=self._message_bytes(node, name.microbatch),
                reads=buffers.reads,
                frees=buffers.frees,
            )

    def _finish(self, node: Node) -> None:
        """Emit a task that runs once per step."""
        bucket = next((b for b in self._buckets if b.name == node.bucket), None)
        number = NONE if bucket is None else self._buckets.index(bucket)
        if node.kind is TaskKind.NORM:
            self._append(node, NONE, work=self.works.of_norm(self._buckets))
        elif bucket is None:
            self._append(node, NONE, size_bytes=DTYPE_BYTES["fp32"])
        elif node.kind is TaskKind.UPDATE:
            self._append(node, NONE, bucket=number, work=self.works.of_update(bucket))
        else:
            gathers = node.kind is TaskKind.ALL_GATHER
            element = DTYPE_BYTES[self.graph.dtype] if gathers else GRADIENT_BYTES
            self._append(node, NONE, bucket=number, size_bytes=bucket.padded_numel * element)

    def _wait_for_previous_step(self) -> None:
        for position in self._ungated:
            self._tasks[position] = replace(self._tasks[position], previous_step_waits=(self._last_compute,))
        first: dict[str, int] = {}
        for (uid, _), position in self._position.items():
            first[uid] = min(first.get(uid, position), position)
        for uid, position in first.items():
            edges = self.graph.incoming.get(uid, ())
            sources = {self._position[e.source, NONE] for e in edges if e.kind is EdgeKind.PREVIOUS_STEP}
            if sources:
                self._tasks[position] = replace(
                    self._tasks[position], previous_step_waits=tuple(sorted(sources))
                )

    def _transfers(self, name: TaskName, kinds: frozenset[TaskKind]) -> list[Node]:
        """Return the receives before, or the sends after, a slot's task, in edge order."""
        into = kinds is RECV_KINDS
        found: dict[str, Node] = {}
        for node in self._chains[name.stage, name.kind]:
            for edge in (self.graph.incoming if into else self.graph.outgoing).get(node.uid, ()):
                other = self.graph.node[edge.source if into else edge.target]
                if other.kind in kinds:
                    found[other.uid] = other
        return sorted(found.values(), key=lambda node: node.edge)

    def _message_bytes(self, node: Node, microbatch: int) -> int:
        crossing = self.graph.crossings[node.edge]
        down = node.kind in {TaskKind.SEND_F, TaskKind.RECV_F}
        memory = self._stage(node, microbatch).memory
        return memory.values_bytes(crossing.values if down else crossing.grad_values)

    @cached_property
    def _own(self) -> tuple[Node, ...]:
        return tuple(n for n in self.graph.nodes if n.pipeline_rank == self.pipeline_rank)

    @cached_property
    def _step_end(self) -> tuple[Node, ...]:
        own = {n.uid for n in self._own if not n.per_microbatch}
        return tuple(self.graph.node[uid] for uid in self.order if uid in own)

    @cached_property
    def _chains(self) -> dict[tuple[int, TaskKind], tuple[Node, ...]]:
        """(stage, F or B) -> its compute nodes in the order in which one slot runs them."""
        found: dict[tuple[int, TaskKind], tuple[Node, ...]] = {}
        for stage in self.graph.stages_of_rank(self.pipeline_rank):
            own = [n for n in self._own if n.stage == stage]
            backward = [n for n in own if n.kind in {TaskKind.B, TaskKind.R}]
            found[stage, TaskKind.F] = tuple(n for n in own if n.kind is TaskKind.F)
            found[stage, TaskKind.B] = tuple(
                sorted(backward, key=lambda n: (-n.first_segment, n.kind is TaskKind.B))
            )
        return found

    @property
    def _buckets(self) -> tuple[Bucket, ...]:
        return self.graph.buckets[self.pipeline_rank]

    def _numbered(self, bucket: Bucket) -> Bucket:
        if bucket.group == NONE:
            return bucket
        name = bucket.name if bucket.kind == "tied" else f"dp{self.pipeline_rank}"
        return replace(bucket, group=self.groups[name])

    def _stage(self, node: Node, microbatch: int) -> ComputeBuffers:
        micro_batch = self.graph.micro_batch_sizes[microbatch]
        key = (node.stage, micro_batch)
        if key not in self._stages:
            memory = StageMemory(
                graph=self.graph,
                model=next(m for m in self.graph.models if m.micro_batch == micro_batch),
                forward=self._chains[node.stage, TaskKind.F][0],
                islands=tuple(n for n in self._chains[node.stage, TaskKind.B] if n.kind is TaskKind.B)[::-1],
            )
            self._stages[key] = ComputeBuffers(book=self._book, graph=self.graph, memory=memory)
        return self._stages[key]

    def _is_part(self, node: Node) -> bool:
        whole = self._chains[node.stage, TaskKind.F][0]
        return (node.first_segment, node.last_segment) != (whole.first_segment, whole.last_segment)

    def _edge_part(self, node: Node) -> int:
        """Return the edge's number where the stage has several transfers of this kind, else NONE."""
        same = [n for n in self._own if n.kind is node.kind and n.stage == node.stage]
        return node.edge if len(same) > 1 else NONE

    def _append(self, node: Node, microbatch: int, **fields: Any) -> None:
        """Append the task of a node; `fields` are what its kind adds, or `waits` in place of the graph's."""
        task = Task(
            kind=node.kind,
            stage=node.stage,
            microbatch=microbatch,
            first_segment=node.first_segment,
            last_segment=node.last_segment,
            stream=self._streams.setdefault(node.stream, len(self._streams)),
            peer=node.peer,
            edge=node.edge,
            group=self.groups[node.group] if node.kind in COLLECTIVE_KINDS else NONE,
            waits=fields.pop("waits") if "waits" in fields else self._waits(node, microbatch),
            **fields,
        )
        self._position[node.uid, microbatch] = len(self._tasks)
        if task.stream == COMPUTE_STREAM:
            self._last_compute = len(self._tasks)
        self._tasks.append(task)

    def _waits(self, node: Node, microbatch: int) -> tuple[int, ...]:
        """Return the last task on each other stream that the node comes after."""
        latest: dict[int, int] = {}
        for edge in self.graph.incoming.get(node.uid, ()):
            source = self.graph.node[edge.source]
            if edge.kind is EdgeKind.PREVIOUS_STEP or source.stream == node.stream:
                continue
            every = source.per_microbatch and not node.per_microbatch
            numbers = range(len(self.graph.micro_batch_sizes)) if every else (microbatch,)
            stream = self._streams[source.stream]
            position = max(self._position[source.uid, number] for number in numbers)
            latest[stream] = max(latest.get(stream, NONE), position)
        return tuple(sorted(latest.values()))

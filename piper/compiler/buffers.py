"""The buffers of one device plan: static ones, and those that tasks allocate, read and free."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from cost_models.errors import check_invariant
from cost_models.ops import DTYPE_BYTES
from piper.compiler.memory import StageMemory
from piper.graph import Graph, Node
from simulator.plan import RECV_KINDS, SEND_KINDS, Bucket, BufferTable, MemoryClass, TaskKind

GRADIENT_BYTES = 4
"""Main gradients are fp32 (DESIGN 3)."""

OPTIMIZER_BYTES = {("adamw", 4): 8, ("adamw", 2): 12, ("sgd", 4): 0, ("sgd", 2): 4}
"""(optimizer, bytes of a parameter) -> state: fp32 moments, fp32 master of a 2-byte parameter (DESIGN 3)."""

Key = tuple[object, ...]
"""What a buffer is for; the microbatch comes third: ("kept", stage, microbatch, island)."""


@dataclass(slots=True)
class BufferBook:
    """Buffers in order of creation, found again by key."""

    _sizes: list[int] = field(default_factory=list)
    _classes: list[int] = field(default_factory=list)
    _persistent: list[bool] = field(default_factory=list)
    _owners: list[str] = field(default_factory=list)
    _number: dict[Key, int] = field(default_factory=dict)

    def create(
        self, key: Key, size_bytes: int, memory_class: MemoryClass, *, owner: str, persistent: bool = False
    ) -> tuple[int, ...]:
        """Create a buffer and return it; nothing for zero bytes."""
        if size_bytes == 0:
            return ()
        check_invariant(key not in self._number, f"buffer {key} is made twice")
        self._number[key] = len(self._sizes)
        self._sizes.append(size_bytes)
        self._classes.append(int(memory_class))
        self._persistent.append(persistent)
        self._owners.append(owner)
        return (self._number[key],)

    def held(self, *key: object) -> tuple[int, ...]:
        """Return the buffer of a key, or nothing if it was never made."""
        return (self._number[key],) if key in self._number else ()

    def table(self) -> BufferTable:
        """Return all buffers as columns."""
        return BufferTable.of(
            size_bytes=self._sizes,
            memory_class=self._classes,
            persistent=self._persistent,
            owners=self._owners,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskBuffers:
    """What one task does to memory: numbers of buffers."""

    allocates: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()


def add_static_buffers(book: BufferBook, graph: Graph, pipeline_rank: int) -> None:
    """Create what lives through all steps: parameters, gradients, optimizer state (DESIGN 3), tables."""
    element = DTYPE_BYTES[graph.dtype]
    state = OPTIMIZER_BYTES[graph.optimizer, element]
    for bucket in (b for b in graph.buckets[pipeline_rank] if b.kind == "dense"):
        for memory_class, size in (
            (MemoryClass.PARAMETERS, bucket.padded_numel * element),
            (MemoryClass.GRADIENTS, bucket.padded_numel * GRADIENT_BYTES),
            (MemoryClass.OPTIMIZER, bucket.padded_numel // bucket.shard_count * state),
        ):
            owner = f"{memory_class.name.lower()} of {_stage_names(bucket)}"
            book.create((memory_class, bucket.name), size, memory_class, owner=owner, persistent=True)
    frozen = _frozen_numel(graph, pipeline_rank) * element
    book.create(("frozen",), frozen, MemoryClass.PARAMETERS, owner="frozen parameters", persistent=True)
    tables = graph.model.buffer_bytes
    book.create(("tables",), tables, MemoryClass.WORKSPACE, owner="buffers of the module", persistent=True)


def _stage_names(bucket: Bucket) -> str:
    return f"stage {bucket.stage}"


def _frozen_numel(graph: Graph, pipeline_rank: int) -> int:
    used = {
        name
        for stage in graph.stages_of_rank(pipeline_rank)
        for segment in graph.segments_of_stage(stage)
        for name in graph.model.segments[segment].parameters
    }
    return sum(p.numel for p in graph.model.parameters if p.name in used and not p.trainable)


@dataclass(kw_only=True)
class ComputeBuffers:
    """Buffers of F, R and B of one stage at one microbatch size.

    Args:
        book: where they are created.
        graph: after all passes.
        memory: lifetimes of the stage.
    """

    book: BufferBook
    graph: Graph
    memory: StageMemory

    def of(self, node: Node, microbatch: int) -> TaskBuffers:
        """Create and return the buffers of one compute task."""
        scratch = self._create(
            ("workspace", node.uid, microbatch),
            self.memory.workspace_bytes(node),
            MemoryClass.WORKSPACE,
            what=f"{node.kind.name} workspace",
        )
        if node.kind is TaskKind.F:
            found = self._forward(node, microbatch)
        elif node.kind is TaskKind.R:
            found = self._recompute(node, microbatch)
        else:
            found = self._backward(node, microbatch)
        return TaskBuffers(
            allocates=scratch + found.allocates,
            reads=tuple(dict.fromkeys(scratch + found.reads)),
            frees=tuple(dict.fromkeys(found.frees + scratch)),
        )

    def of_receive(self, node: Node, microbatch: int, size_bytes: int) -> tuple[int, ...]:
        """Create the buffer of a receive: an activation where a B needs it, else transient."""
        crossing = self.graph.crossings[node.edge]
        kept = node.kind is TaskKind.RECV_F and self.memory.received_until(crossing) is not None
        what = "activation" if node.kind is TaskKind.RECV_F else "gradient"
        return self._create(
            ("recv", node.uid, microbatch),
            size_bytes,
            MemoryClass.ACTIVATIONS if kept else MemoryClass.COMMUNICATION,
            what=f"received {what}",
        )

    def of_send(self, node: Node, microbatch: int) -> TaskBuffers:
        """Return what a send reads, and frees when nobody else needs it."""
        own = self.book.held("send", node.uid, microbatch)
        kept: tuple[int, ...] = ()
        if node.kind is TaskKind.SEND_F:
            for island in self.memory.kept_islands_of_sent(self.graph.crossings[node.edge]):
                kept += self.book.held("kept", node.stage, microbatch, island)
        return TaskBuffers(reads=own + kept, frees=own)

    def _forward(self, node: Node, microbatch: int) -> TaskBuffers:
        allocated: tuple[int, ...] = ()
        for island, size in enumerate(self.memory.kept_from_forward):
            key = ("kept", node.stage, microbatch, island)
            allocated += self._create(key, size, MemoryClass.ACTIVATIONS, what="activations")
        for send in self._neighbours(node, SEND_KINDS):
            size = self.memory.sent_bytes(self.graph.crossings[send.edge])
            allocated += self._create(
                ("send", send.uid, microbatch), size, MemoryClass.COMMUNICATION, what="output"
            )
        freed: tuple[int, ...] = ()
        for receive in self._neighbours(node, RECV_KINDS):
            if self.memory.received_until(self.graph.crossings[receive.edge]) is None:
                freed += self.book.held("recv", receive.uid, microbatch)
        return TaskBuffers(allocates=allocated, reads=self._received(node, microbatch), frees=freed)

    def _recompute(self, node: Node, microbatch: int) -> TaskBuffers:
        island = self._island(node)
        key = ("recomputed", node.stage, microbatch, island)
        size = self.memory.kept_from_recompute[island]
        made = self._create(key, size, MemoryClass.ACTIVATIONS, what="recomputed activations")
        return TaskBuffers(
            allocates=made, reads=self._alive(microbatch, island) + self._inputs(microbatch, island)
        )

    def _backward(self, node: Node, microbatch: int) -> TaskBuffers:
        island = self._island(node)
        own = self.book.held("kept", node.stage, microbatch, island)
        own += self.book.held("recomputed", node.stage, microbatch, island)
        own += self._inputs(microbatch, island, last=True)
        arriving = self._received(node, microbatch)
        ended = own + tuple(b for b in arriving if not self._read_later(node, microbatch, b))
        allocated: tuple[int, ...] = ()
        for edge in self.graph.outgoing.get(node.uid, ()):
            allocated += self._gradient_out(node, self.graph.node[edge.target], microbatch)
        flowing: tuple[int, ...] = ()
        for edge in self.graph.incoming.get(node.uid, ()):
            flowing += self.book.held("gradient", edge.source, microbatch, node.uid)
        reads = own + self._alive(microbatch, island) + self._inputs(microbatch, island) + arriving + flowing
        return TaskBuffers(allocates=allocated, reads=reads, frees=ended + flowing)

    def _gradient_out(self, node: Node, target: Node, microbatch: int) -> tuple[int, ...]:
        if target.kind is TaskKind.B:
            key: Key = ("gradient", node.uid, microbatch, target.uid)
            size = self.memory.gradient_bytes(node, target)
            return self._create(key, size, MemoryClass.WORKSPACE, what="gradient of activations")
        key = ("send", target.uid, microbatch)
        if target.kind is not TaskKind.SEND_B or self.book.held(*key):
            return ()
        values = self.graph.crossings[target.edge].grad_values
        return self._create(
            key, self.memory.values_bytes(values), MemoryClass.COMMUNICATION, what="gradient to send"
        )

    def _alive(self, microbatch: int, island: int) -> tuple[int, ...]:
        """Return kept buffers of this and lower islands: where an R or a B finds its tensors."""
        stage, highest = self.memory.forward.stage, min(island + 1, len(self.memory.islands))
        found: tuple[int, ...] = ()
        for lower in range(highest):
            found += self.book.held("kept", stage, microbatch, lower)
        return found

    def _inputs(self, microbatch: int, island: int, *, last: bool = False) -> tuple[int, ...]:
        """Return received activations that an island may read (`last`: whose last reader it is)."""
        found: tuple[int, ...] = ()
        for receive in self._stage_receives:
            until = self.memory.received_until(self.graph.crossings[receive.edge])
            if until is not None and (until == island or (not last and until < island)):
                found += self.book.held("recv", receive.uid, microbatch)
        return found

    def _received(self, node: Node, microbatch: int) -> tuple[int, ...]:
        found: tuple[int, ...] = ()
        for receive in self._neighbours(node, RECV_KINDS):
            found += self.book.held("recv", receive.uid, microbatch)
        return found

    def _read_later(self, node: Node, microbatch: int, buffer: int) -> bool:
        lower = (other for other in self.memory.islands if other.first_segment < node.first_segment)
        return any(buffer in self._received(other, microbatch) for other in lower)

    def _neighbours(self, node: Node, kinds: frozenset[TaskKind]) -> list[Node]:
        if kinds is RECV_KINDS:
            others = [self.graph.node[edge.source] for edge in self.graph.incoming.get(node.uid, ())]
        else:
            others = [self.graph.node[edge.target] for edge in self.graph.outgoing.get(node.uid, ())]
        return [other for other in others if other.kind in kinds]

    @cached_property
    def _stage_receives(self) -> tuple[Node, ...]:
        stage = self.memory.forward.stage
        return tuple(n for n in self.graph.nodes if n.kind is TaskKind.RECV_F and n.stage == stage)

    def _island(self, node: Node) -> int:
        starts = [other.first_segment for other in self.memory.islands]
        return starts.index(node.first_segment)

    def _create(self, key: Key, size_bytes: int, memory_class: MemoryClass, *, what: str) -> tuple[int, ...]:
        owner = f"stage {self.memory.forward.stage} microbatch {key[2]} {what}"
        return self.book.create(key, size_bytes, memory_class, owner=owner)

"""Liveness: which tensors a microbatch brings to life on a device, which task makes each and which frees it.

[Note: lifetimes]
A tensor is made by one task and touched by others; the last of them frees it. Kept from F: what an
operation saved for the backward (until B; what the gradients of parameters need until BW), and boundary
tensors that a later task reads. A recomputed segment keeps nothing inside: its R makes it again. A boundary
tensor that only its own task reads is scratch. Between two B flow gradients of boundary tensors. Tensors
made and freed by the same tasks are one buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from piper.compiler.local import LocalModel, Value
from piper.graph import Graph, Node
from simulator.plan import NONE, SEND_KINDS, MemoryClass, TaskKind

BACKWARD = (TaskKind.B, TaskKind.BI)


@dataclass(slots=True, kw_only=True)
class Buffer:
    """Tensors of one microbatch with one life.

    Args:
        size_bytes: all of them.
        memory_class: of the buffer.
        label: for people, `{}` stands for the microbatch.
        touches: positions of tasks in order: the first allocates, the last frees, all read.
    """

    size_bytes: int
    memory_class: MemoryClass
    label: str
    touches: tuple[int, ...]


@dataclass(kw_only=True)
class Liveness:
    """Lifetimes of one microbatch on one device.

    Args:
        graph: after all passes.
        local: what the rank holds, at the microbatch's size.
        nodes: the microbatch's tasks on this device, in dispatch order.
    """

    graph: Graph
    local: LocalModel
    nodes: Sequence[Node]
    _found: dict[tuple[object, ...], Buffer] = field(default_factory=dict)

    def buffers(self) -> list[Buffer]:
        """Return all buffers, in the order in which they come to life."""
        for position, node in enumerate(self.nodes):
            if node.kind is TaskKind.F:
                self._forward(position, node)
            elif node.kind is TaskKind.R:
                self._recompute(position, node)
            elif node.kind in BACKWARD:
                self._backward(position, node)
            elif node.is_exchange:
                self._exchange(position, node)
            elif node.kind in {TaskKind.RECV_F, TaskKind.RECV_B}:
                self._receive(position, node)
            if node.first_segment >= 0:
                self._scratch(position, node)
        return list(self._found.values())

    def _forward(self, position: int, node: Node) -> None:
        for segment in _span(node):
            if segment not in self._recomputed:
                self._saved(position, segment, what="activations")
        for value in self._made_by(node):
            readers = self._readers(value)
            if any(reader != position for reader in readers):
                sent_only = all(self.nodes[r].kind in SEND_KINDS | {TaskKind.F} for r in readers)
                sent_only = sent_only and any(self.nodes[r].kind in SEND_KINDS for r in readers)
                kind = MemoryClass.COMMUNICATION if sent_only else MemoryClass.ACTIVATIONS
                what = "output" if sent_only else "activations"
                self._add(position, readers, self.local.value_bytes(value), what=(node.stage, kind, what))

    def _recompute(self, position: int, node: Node) -> None:
        inside = range(node.first_segment, node.last_segment + 1)
        for segment in inside:
            self._saved(position, segment, what="recomputed activations")
        for value in self._made_by(node):
            needs = [
                p
                for consumer, at in self.local.consumers.get(value, ())
                if consumer in inside and self.local.segment(consumer).inputs_saved[at]
                for p in self._gradient_tasks(consumer, weights=self._for_weights(consumer, at))
            ]
            if self.local.segment(value[0]).outputs_saved[value[1]]:
                needs += self._gradient_tasks(value[0], weights=self._output_for_weights(value))
            what = (node.stage, MemoryClass.ACTIVATIONS, "recomputed activations")
            self._add(position, needs, self.local.value_bytes(value), what=what)

    def _backward(self, position: int, node: Node) -> None:
        """Add the gradients that a B or BI makes: for other tasks of this device, and to be sent."""
        if node.kind is TaskKind.BI:
            kept = (node.stage, MemoryClass.ACTIVATIONS, "gradients for weights")
            for segment in _span(node):
                size = self.local.gradients_for_weights_bytes(segment)
                self._add(position, self._weight_tasks(segment), size, what=kept)
        flowing = (node.stage, MemoryClass.WORKSPACE, "gradient of activations")
        leaving = (node.stage, MemoryClass.COMMUNICATION, "gradient to send")
        for edge in self.graph.outgoing.get(node.uid, ()):
            target = self.graph.node[edge.target]
            place = self._position.get(edge.target)
            if place is None or target.kind is TaskKind.BW:
                continue
            if target.kind in BACKWARD:
                size = self.local.values_bytes(gradient_values(self.local, node, target))
                self._add(position, [place], size, what=flowing)
            elif target.is_exchange:
                size = sum(self._before_exchange(target, value) for value in target.values)
                self._add(position, [place], size, what=flowing)
            elif target.kind is TaskKind.SEND_B and self._last_source(target) == position:
                size = self.local.values_bytes(self.graph.crossings[target.edge].grad_values)
                self._add(position, [place], size, what=leaving)

    def _exchange(self, position: int, node: Node) -> None:
        """Add what an exchange leaves behind: for F until the tasks that saved it, for B until it is read."""
        targets = [
            self._position[e.target]
            for e in self.graph.outgoing.get(node.uid, ())
            if e.target in self._position
        ]
        size = sum(self._after_exchange(node, value) for value in node.values)
        readers = list(targets)
        if node.phase is TaskKind.F:
            for value in node.values:
                readers += self._kept_for(value, through=node)
        sent = bool(targets) and all(self.nodes[p].kind in SEND_KINDS for p in targets)
        kind = MemoryClass.COMMUNICATION if sent or node.phase is not TaskKind.F else MemoryClass.ACTIVATIONS
        self._add(position, readers, size, what=(node.stage, kind, "exchanged tensors"))

    def _receive(self, position: int, node: Node) -> None:
        crossing = self.graph.crossings[node.edge]
        down = node.kind is TaskKind.RECV_F
        readers = [
            self._position[e.target]
            for e in self.graph.outgoing.get(node.uid, ())
            if e.target in self._position
        ]
        kept: list[int] = []
        if down:
            for value in crossing.values:
                kept += self._kept_for(value, through=node)
        size = self.local.values_bytes(crossing.values if down else crossing.grad_values)
        kind = MemoryClass.ACTIVATIONS if kept else MemoryClass.COMMUNICATION
        what = "received activation" if down else "received gradient"
        self._add(position, readers + kept, size, what=(node.stage, kind, what))

    def _scratch(self, position: int, node: Node) -> None:
        size = max(self._workspace(segment, node) for segment in _span(node))
        what = (node.stage, MemoryClass.WORKSPACE, f"{node.kind.name} workspace")
        self._add(position, [position], size, what=what)

    def _workspace(self, segment: int, node: Node) -> int:
        """Return the transient bytes of a segment, with boundary tensors that only this task knows."""
        no_grad = node.kind is TaskKind.F and segment in self._recomputed
        size = self.local.workspace_bytes(segment, node.kind, no_grad=no_grad)
        found = self.local.segment(segment)
        span = range(node.first_segment, node.last_segment + 1)
        inner = [v for v in found.inputs if v[0] in span]
        outputs = [(segment, output) for output in range(len(found.outputs))]
        if node.kind in {TaskKind.F, TaskKind.R}:
            passing = {v for v in (*inner, *outputs) if not self._outlives(v, node)}
            return size + self.local.values_bytes(sorted(passing))
        inner += [v for v in outputs if any(c in span for c, _ in self.local.consumers.get(v, ()))]
        flowing = [v for v in inner if self.local.segment(v[0]).outputs[v[1]].requires_grad]
        return size + (self.local.values_bytes(flowing) if node.kind is not TaskKind.BW else 0)

    def _outlives(self, value: Value, node: Node) -> bool:
        """Return whether a boundary tensor has a buffer of its own (made by F, read by another task)."""
        if value not in self._outliving:
            maker = self._forward_tasks.get(value[0])
            self._outliving[value] = any(reader != maker for reader in self._readers(value))
        return self._outliving[value]

    @cached_property
    def _outliving(self) -> dict[Value, bool]:
        return {}

    def _saved(self, position: int, segment: int, *, what: str) -> None:
        stage = self.graph.stage_of_segment[segment]
        description = (stage, MemoryClass.ACTIVATIONS, what)
        until_inputs = self._gradient_tasks(segment, weights=False)
        until_weights = self._gradient_tasks(segment, weights=True)
        self._add(
            position, until_inputs, self.local.saved_bytes(segment, for_weights=False), what=description
        )
        self._add(
            position, until_weights, self.local.saved_bytes(segment, for_weights=True), what=description
        )

    def _readers(self, value: Value) -> list[int]:
        """Return the tasks that read a boundary tensor which an F of this device made."""
        segment, output = value
        found = [
            self._position[edge.target]
            for edge in self.graph.outgoing.get(self._forward_uid[segment], ())
            if edge.target in self._position and self._carries(self.graph.node[edge.target], value)
        ]
        found += self._kept_for(value, through=None)
        if segment not in self._recomputed and self.local.segment(segment).outputs_saved[output]:
            found += self._gradient_tasks(segment, weights=self._output_for_weights(value))
        return found

    def _carries(self, node: Node, value: Value) -> bool:
        if node.kind is TaskKind.SEND_F:
            return value in self.graph.crossings[node.edge].values
        if node.is_exchange:
            return value in node.values
        return node.kind is TaskKind.F and any(value in self.local.segment(i).inputs for i in _span(node))

    def _kept_for(self, value: Value, *, through: Node | None) -> list[int]:
        """Return the R and B tasks that need a boundary tensor as their consumer saw it in F.

        `through`: the receive or exchange that the consumer took it from (None: from the producer).
        """
        found: list[int] = []
        for consumer, at in self.local.consumers.get(value, ()):
            if consumer not in self._forward_uid or self._carrier(value, consumer) is not through:
                continue
            if consumer in self._recomputed and not self._same_island(value[0], consumer):
                found += self._recompute_tasks.get(consumer, ())
                found += self._gradient_tasks(consumer, weights=self._for_weights(consumer, at))
            elif consumer not in self._recomputed and self.local.segment(consumer).inputs_saved[at]:
                found += self._gradient_tasks(consumer, weights=self._for_weights(consumer, at))
        return found

    def _carrier(self, value: Value, consumer: int) -> Node | None:
        """Return the receive or exchange from which a segment's F takes a boundary tensor, or None."""
        for edge in self.graph.incoming.get(self._forward_uid[consumer], ()):
            source = self.graph.node[edge.source]
            if source.is_exchange and value in source.values:
                return source
        for edge in self.graph.incoming.get(self._forward_uid[consumer], ()):
            source = self.graph.node[edge.source]
            if source.kind is TaskKind.RECV_F and value in self.graph.crossings[source.edge].values:
                return source
        return None

    def _same_island(self, producer: int, consumer: int) -> bool:
        return bool(
            set(self._recompute_tasks.get(producer, ())) & set(self._recompute_tasks.get(consumer, ()))
        )

    def _for_weights(self, consumer: int, at: int) -> bool:
        return _flag(self.local.segment(consumer).inputs_saved_for_weights, at)

    def _output_for_weights(self, value: Value) -> bool:
        return _flag(self.local.segment(value[0]).outputs_saved_for_weights, value[1])

    def _gradient_tasks(self, segment: int, *, weights: bool) -> list[int]:
        """Return the B or BI of a segment, and its BW when parameter gradients need the tensor too."""
        found = [self._backward_tasks[segment]] if segment in self._backward_tasks else []
        return found + (self._weight_tasks(segment) if weights else [])

    def _weight_tasks(self, segment: int) -> list[int]:
        return [self._bw_tasks[segment]] if segment in self._bw_tasks else []

    def _targets(self, node: Node) -> list[int]:
        outgoing = self.graph.outgoing.get(node.uid, ())
        return [self._position[edge.target] for edge in outgoing if edge.target in self._position]

    def _last_source(self, node: Node) -> int:
        incoming = self.graph.incoming.get(node.uid, ())
        return min(self._position[e.source] for e in incoming if e.source in self._position)

    def _before_exchange(self, node: Node, value: Value) -> int:
        """Return the bytes of a gradient on the consumer's side of an exchange in B."""
        return self.local.gathered_bytes(value) if node.enters else self.local.value_bytes(value)

    def _after_exchange(self, node: Node, value: Value) -> int:
        """Return the bytes that an exchange leaves of one boundary tensor."""
        return exchanged_bytes(self.local, node, value)

    @cached_property
    def _position(self) -> dict[str, int]:
        return {node.uid: i for i, node in enumerate(self.nodes)}

    def _by_segment(self, kinds: Iterable[TaskKind]) -> dict[int, int]:
        wanted = frozenset(kinds)
        return {s: i for i, node in enumerate(self.nodes) if node.kind in wanted for s in _span(node)}

    @cached_property
    def _forward_tasks(self) -> dict[int, int]:
        return self._by_segment([TaskKind.F])

    @cached_property
    def _forward_uid(self) -> dict[int, str]:
        return {segment: self.nodes[i].uid for segment, i in self._forward_tasks.items()}

    @cached_property
    def _backward_tasks(self) -> dict[int, int]:
        return self._by_segment(BACKWARD)

    @cached_property
    def _bw_tasks(self) -> dict[int, int]:
        return self._by_segment([TaskKind.BW])

    @cached_property
    def _recompute_tasks(self) -> dict[int, tuple[int, ...]]:
        return {segment: (i,) for segment, i in self._by_segment([TaskKind.R]).items()}

    @cached_property
    def _recomputed(self) -> frozenset[int]:
        return frozenset(self._recompute_tasks)

    def _made_by(self, node: Node) -> list[Value]:
        return [(i, o) for i in _span(node) for o in range(len(self.local.segment(i).outputs))]

    def _add(
        self, position: int, touches: Iterable[int], size_bytes: int, *, what: tuple[int, MemoryClass, str]
    ) -> None:
        """Add a tensor made at `position`; nothing if nobody reads it, or it has no bytes."""
        if size_bytes == 0:
            return
        readers = tuple(sorted({position, *touches}))
        if not tuple(touches):
            return
        stage, memory_class, text = what
        key = (position, readers[-1], memory_class, text)
        label = f"stage {stage} microbatch {{}} {text}"
        if key in self._found:
            buffer = self._found[key]
            buffer.size_bytes += size_bytes
            buffer.touches = tuple(sorted({*buffer.touches, *readers}))
        else:
            self._found[key] = Buffer(
                size_bytes=size_bytes, memory_class=memory_class, label=label, touches=readers
            )


def message_bytes(graph: Graph, local: LocalModel, node: Node) -> int:
    """Return the bytes of a transfer or an exchange, as its kind counts them (`simulator.plan.Task`)."""
    if node.edge != NONE:
        crossing = graph.crossings[node.edge]
        down = node.kind in {TaskKind.SEND_F, TaskKind.RECV_F}
        return local.values_bytes(crossing.values if down else crossing.grad_values)
    whole = node.kind in {TaskKind.ALL_GATHER, TaskKind.REDUCE_SCATTER}
    return sum(local.gathered_bytes(v) if whole else local.value_bytes(v) for v in node.values)


def exchanged_bytes(local: LocalModel, node: Node, value: Value) -> int:
    """Return the bytes of a boundary tensor (or of its gradient) behind an exchange."""
    return local.gathered_bytes(value) if node.kind is TaskKind.ALL_GATHER else local.value_bytes(value)


def gradient_values(local: LocalModel, source: Node, target: Node) -> tuple[Value, ...]:
    """Return the tensors whose gradients the B `source` (their consumer) hands to the B `target`."""
    found = {
        value: None
        for i in _span(source)
        for value in local.segment(i).inputs
        if target.first_segment <= value[0] <= target.last_segment
        and local.segment(value[0]).outputs[value[1]].requires_grad
    }
    return tuple(found)


def _flag(stated: tuple[bool, ...], at: int) -> bool:
    """Return a flag of a captured segment; a segment that states none keeps all until BW."""
    return stated[at] if stated else True


def _span(node: Node) -> range:
    return range(node.first_segment, node.last_segment + 1)

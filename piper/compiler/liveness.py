"""Liveness: which tensors a microbatch brings to life on a device, which task makes each and which frees it.

[Note: lifetimes]
A tensor is made by one task and touched by others; the last of them frees it. Kept from F: what an
operation saved for the backward (until B; what the gradients of parameters need until BW), and boundary
tensors that a later task reads. A recomputed segment keeps nothing inside: its R makes it again. A boundary
tensor that only its own task reads is scratch. Between two B flow gradients of boundary tensors. Tokens and
labels wait on the host: each F or R takes a copy, which lives on for every B that reads it. Parts of the
gradient of a parameter that several B of a stage make are summed first. Tensors made and freed by the same
tasks are one buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

from cost_models.ops import DTYPE_BYTES, kept_dtype
from piper.compiler.local import LocalModel, Value
from piper.compiler.readers import BACKWARD, Readers, span
from piper.graph import Graph, Node
from simulator.plan import HOST_COPY_KINDS, NONE, SEND_KINDS, MemoryClass, TaskKind


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

    @cached_property
    def _readers(self) -> Readers:
        return Readers(graph=self.graph, local=self.local, nodes=self.nodes)

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
        self._shared_gradients()
        return list(self._found.values())

    def _forward(self, position: int, node: Node) -> None:
        for segment in span(node):
            self._saved(position, segment, remade=False)
            kept = (node.stage, MemoryClass.ACTIVATIONS, "activations")
            tasks = self._readers.gradient_tasks(segment, weights=True)
            self._add(position, tasks, self.local.kept_result_bytes(segment), what=kept)
        self._model_inputs(position, node)
        for value in self._made_by(node):
            readers = self._readers.of_made(value)
            if any(reader != position for reader in readers):
                others = [self.nodes[r] for r in readers if self.nodes[r].kind is not TaskKind.F]
                sent_only = bool(others) and all(_moves(other) for other in others)
                kind = MemoryClass.COMMUNICATION if sent_only else MemoryClass.ACTIVATIONS
                what = "output" if sent_only else "activations"
                self._add(position, readers, self.local.value_bytes(value), what=(node.stage, kind, what))

    def _recompute(self, position: int, node: Node) -> None:
        for segment in span(node):
            self._saved(position, segment, remade=True)
        self._model_inputs(position, node)
        for value in self._made_by(node):
            if value[0] not in self._readers.recomputed:
                continue
            needs = self._readers.remade_for(value, through=None)
            needs += [
                self._readers.position[e.target]
                for e in self.graph.outgoing.get(node.uid, ())
                if e.target in self._readers.position and value in self.graph.node[e.target].values
            ]
            if self.local.segment(value[0]).outputs_saved[value[1]]:
                needs += self._readers.gradient_tasks(
                    value[0], weights=self._readers.output_for_weights(value)
                )
            what = (node.stage, MemoryClass.ACTIVATIONS, "recomputed activations")
            self._add(position, needs, self.local.value_bytes(value), what=what)

    def _backward(self, position: int, node: Node) -> None:
        """Add the gradients that a B or BI makes: for other tasks of this device, and to be sent."""
        if node.kind is TaskKind.BI:
            self._gradients_for_weights(position, node)
        flowing = (node.stage, MemoryClass.WORKSPACE, "gradient of activations")
        leaving = (node.stage, MemoryClass.COMMUNICATION, "gradient to send")
        for edge in self.graph.outgoing.get(node.uid, ()):
            target = self.graph.node[edge.target]
            place = self._readers.position.get(edge.target)
            if place is None or target.kind is TaskKind.BW:
                continue
            if target.kind in BACKWARD:
                for value in gradient_values(self.local, node, target):
                    tasks = [place, *self._readers.late_tasks(value, target=target)]
                    tasks += self._readers.late_takers(value, node)
                    self._add(position, tasks, self.local.value_bytes(value), what=flowing)
            elif target.is_exchange:
                for value in self._taken(node, target.values):
                    tasks = [place, *self._readers.late_takers(value, node)]
                    size = self.local.exchange_bytes(target, value)[0]
                    self._add(position, tasks, size, what=flowing)
            elif target.kind is TaskKind.SEND_B:
                for value in self._taken(node, self.graph.crossings[target.edge].grad_values):
                    tasks = [place, *self._readers.late_takers(value, node)]
                    self._add(position, tasks, self.local.outside_bytes(value), what=leaving)

    def _gradients_for_weights(self, position: int, node: Node) -> None:
        """Add what BI leaves to BW of the gradients that it makes or sums up."""
        kept = (node.stage, MemoryClass.ACTIVATIONS, "gradients for weights")
        shared: set[tuple[int, ...]] = set()
        for segment in span(node):
            tasks = self._readers.weight_tasks(segment)
            self._add(position, tasks, self.local.gradients_for_weights_bytes(segment), what=kept)
            numbers = self.local.segment(segment).shared_gradients
            for output in range(len(self.local.segment(segment).outputs)):
                value = (segment, output)
                late = self._readers.late_takers(value, node)
                late += tasks if self._readers.is_summed_for_weights(value, node) else []
                one = (numbers[output] if numbers else NONE, *late)
                if late and one not in shared:
                    self._add(position, late, self.local.value_bytes(value), what=kept)
                    shared |= {one} if one[0] != NONE else set()

    def _exchange(self, position: int, node: Node) -> None:
        """Add what an exchange leaves behind: F and R until the tasks that saved it, B until it is read."""
        targets = self._readers.targets(node)
        if node.kind is TaskKind.RING_SHIFT:
            what = (node.stage, MemoryClass.COMMUNICATION, "keys and values on their way")
            self._add(position, [position], self.local.ring_buffer_bytes(node), what=what)
            return
        size = sum(self.local.exchange_bytes(node, value)[1] for value in node.values)
        kept: list[int] = []
        for value in node.values:
            if node.phase is TaskKind.F:
                kept += self._readers.kept_for(value, through=node)
            elif node.phase is TaskKind.R:
                kept += self._readers.remade_for(value, through=node)
            else:
                kept += self._late(value, targets)
        kind = MemoryClass.ACTIVATIONS if kept else MemoryClass.COMMUNICATION
        self._add(position, targets + kept, size, what=(node.stage, kind, "exchanged tensors"))

    def _receive(self, position: int, node: Node) -> None:
        crossing = self.graph.crossings[node.edge]
        down = node.kind is TaskKind.RECV_F
        text = "received activation" if down else "received gradient"
        for value in crossing.values if down else crossing.grad_values:
            readers = self._readers.of_received(node, value)
            kept = self._readers.kept_for(value, through=node) if down else self._late(value, readers)
            size = self.local.message_bytes(crossing, (value,))
            kind = MemoryClass.ACTIVATIONS if kept else MemoryClass.COMMUNICATION
            self._add(position, readers + kept, size, what=(node.stage, kind, text))

    def _late(self, value: Value, readers: Iterable[int]) -> list[int]:
        """Return the BW that read a gradient which BI takes as it came."""
        return [
            late for reader in readers for late in self._readers.late_tasks(value, target=self.nodes[reader])
        ]

    def _scratch(self, position: int, node: Node) -> None:
        size = max(self._workspace(segment, node) for segment in span(node))
        what = (node.stage, MemoryClass.WORKSPACE, f"{node.kind.name} workspace")
        self._add(position, [position], size, what=what)

    def _workspace(self, segment: int, node: Node) -> int:
        """Return the transient bytes of a segment, with boundary tensors that only this task knows."""
        no_grad = node.kind is TaskKind.F and segment in self._readers.recomputed
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
            maker = self._readers.forward_tasks.get(value[0])
            self._outliving[value] = any(reader != maker for reader in self._readers.of_made(value))
        return self._outliving[value]

    @cached_property
    def _outliving(self) -> dict[Value, bool]:
        return {}

    def _saved(self, position: int, segment: int, *, remade: bool) -> None:
        """Add what a segment keeps inside: what F throws away and R makes again (`remade`), or the rest."""
        what = "recomputed activations" if remade else "activations"
        description = (self.graph.stage_of_segment[segment], MemoryClass.ACTIVATIONS, what)
        for weights in (False, True):
            size = self.local.remade_bytes(segment, for_weights=weights)
            if not remade:
                size = self.local.saved_bytes(segment, for_weights=weights) - size
            readers = self._readers.gradient_tasks(segment, weights=weights)
            copies = None if remade else self._copies.get(segment)
            if copies is None:
                self._add(position, readers, size, what=description)
            else:
                self._add(position, [copies[0]], size, what=description)
                self._add(copies[1], readers, size, what=(*description[:2], "reloaded activations"))

    def _model_inputs(self, position: int, node: Node) -> None:
        """Add the copies of tokens and labels that an F or R leaves to the backward tasks of its segments."""
        remade = node.kind is TaskKind.R
        kept: dict[tuple[int, tuple[int, ...]], tuple[int, set[int]]] = {}
        for segment in span(node):
            if (segment in self._readers.recomputed) != remade:
                continue
            found = self.local.segment(segment)
            for at, (source, number) in enumerate(found.inputs):
                if source >= 0 or not found.inputs_saved[at]:
                    continue
                weights = self._readers.input_for_weights(segment, at)
                tasks = self._readers.gradient_tasks(segment, weights=weights)
                kept.setdefault((number, tuple(tasks[:1])), (segment, set()))[1].update(tasks)
        what = "recomputed activations" if remade else "activations"
        for segment, readers in kept.values():
            size = self.local.model_input_bytes(segment)
            self._add(position, readers, size, what=(node.stage, MemoryClass.ACTIVATIONS, what))

    def _shared_gradients(self) -> None:
        """Add gradients of parameters whose parts of one microbatch come from several tasks of a stage.

        They are summed before they are added to the gradients of the step, from the first part to the last.
        """
        parts: dict[tuple[int, str], list[int]] = {}
        trained = self.local.model.trained_numel
        for position, node in enumerate(self.nodes):
            if node.kind in {TaskKind.B, TaskKind.BW}:
                used = {name: None for i in span(node) for name in self.local.segment(i).parameters}
                for name in used:
                    parts.setdefault((node.stage, name), []).append(position)
        for (stage, name), (first, *more) in parts.items():
            if more and name in trained:
                size = self.local.parameter_numel(name) * DTYPE_BYTES[kept_dtype(self.graph.dtype)]
                what = (stage, MemoryClass.WORKSPACE, "gradients of parameters used again")
                self._add(first, more[-1:], size, what=what)

    @cached_property
    def _copies(self) -> dict[int, tuple[int, int]]:
        """By segment whose activations wait on the host: the copies to and from it."""
        back = {
            self.nodes[i].region: i for i in range(len(self.nodes)) if self.nodes[i].kind is TaskKind.RELOAD
        }
        return {
            segment: (i, back[node.region])
            for i, node in enumerate(self.nodes)
            if node.kind is TaskKind.OFFLOAD
            for segment in self.local.offloaded(node)
        }

    def _taken(self, node: Node, values: Iterable[Value]) -> list[Value]:
        """Return the boundary tensors, of those given, whose gradients a B or BI makes."""
        inputs = {value for i in span(node) for value in self.local.segment(i).inputs}
        return [value for value in values if value in inputs]

    def _made_by(self, node: Node) -> list[Value]:
        return [(i, o) for i in span(node) for o in range(len(self.local.segment(i).outputs))]

    def _add(
        self, position: int, touches: Iterable[int], size_bytes: int, *, what: tuple[int, MemoryClass, str]
    ) -> None:
        """Add a tensor made at `position`; nothing if nobody reads it, or it has no bytes."""
        if size_bytes == 0:
            return
        if what[1] is MemoryClass.ACTIVATIONS and what[2] in _KEPT:
            size_bytes = ceil(size_bytes * self.graph.activation_factor)
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


_KEPT = ("activations", "received activation")
"""What stays from F to B, besides which a framework may keep copies (`Graph.activation_factor`)."""


def message_bytes(graph: Graph, local: LocalModel, node: Node) -> int:
    """Return the bytes of a transfer or an exchange, as its kind counts them (`simulator.plan.Task`)."""
    if node.kind in HOST_COPY_KINDS:
        return local.offloaded_bytes(node)
    if node.edge == NONE:
        return local.exchanged_bytes(node)
    crossing = graph.crossings[node.edge]
    down = node.kind in {TaskKind.SEND_F, TaskKind.RECV_F}
    return local.message_bytes(crossing, crossing.values if down else crossing.grad_values)


def gradient_values(local: LocalModel, source: Node, target: Node) -> tuple[Value, ...]:
    """Return the tensors whose gradients the B `source` (their consumer) hands to the B `target`."""
    found = {
        value: None
        for i in span(source)
        for value in local.segment(i).inputs
        if target.first_segment <= value[0] <= target.last_segment
        and local.segment(value[0]).outputs[value[1]].requires_grad
    }
    return tuple(found)


def _moves(node: Node) -> bool:
    """Return whether a task hands over a tensor that a forward made."""
    return node.kind in SEND_KINDS or (node.is_exchange and node.phase is TaskKind.F)

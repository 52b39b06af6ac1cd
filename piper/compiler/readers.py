"""Readers: which tasks of a microbatch read a tensor that another one made, gathered or received."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from piper.compiler.local import LocalModel, Value
from piper.graph import Graph, Node
from simulator.plan import TaskKind

BACKWARD = (TaskKind.B, TaskKind.BI)


@dataclass(frozen=True, kw_only=True)
class Readers:
    """Who reads what, as positions in `nodes`.

    Args:
        graph: after all passes.
        local: what the rank holds, at the microbatch's size.
        nodes: the microbatch's tasks on this device, in dispatch order.
    """

    graph: Graph
    local: LocalModel
    nodes: Sequence[Node]

    def of_made(self, value: Value) -> list[int]:
        """Return the tasks that read a boundary tensor which an F of this device made."""
        if value not in self._read_by:
            self._read_by[value] = self._find_readers(value)
        return self._read_by[value]

    @cached_property
    def _read_by(self) -> dict[Value, list[int]]:
        return {}

    def of_received(self, node: Node, value: Value) -> list[int]:
        """Return the tasks that take a tensor (RECV_B: its gradient) directly from a receive."""
        targets = self.targets(node)
        if node.kind is TaskKind.RECV_F:
            found = [at for at in targets if self._carries(self.nodes[at], value)]
        else:
            found = [at for at in targets if self._takes_gradient_of(self.nodes[at], value)]
        return found or targets

    def _takes_gradient_of(self, node: Node, value: Value) -> bool:
        """Return whether a node takes the gradient of a boundary tensor, to go back through what made it."""
        return value in node.values if node.is_exchange else value[0] in span(node)

    def _find_readers(self, value: Value) -> list[int]:
        segment, output = value
        found = [
            self.position[edge.target]
            for edge in self.graph.outgoing.get(self._forward_uid[segment], ())
            if edge.target in self.position and self._carries(self.graph.node[edge.target], value)
        ]
        found += self.kept_for(value, through=None)
        if segment not in self.recomputed and self.local.segment(segment).outputs_saved[output]:
            found += self.gradient_tasks(segment, weights=self.output_for_weights(value))
        return found

    def _carries(self, node: Node, value: Value) -> bool:
        if node.kind is TaskKind.SEND_F:
            return value in self.graph.crossings[node.edge].values
        if node.is_exchange:
            return value in node.values
        return node.kind is TaskKind.F and any(value in self.local.segment(i).inputs for i in span(node))

    def kept_for(self, value: Value, *, through: Node | None) -> list[int]:
        """Return the R and B tasks that need a boundary tensor as their consumer saw it in F.

        `through`: the receive or exchange that the consumer took it from (None: from the producer).
        """
        found: list[int] = []
        for consumer, at in self.local.consumers.get(value, ()):
            if consumer not in self._forward_uid:
                continue
            carrier = self._carrier(value, consumer)
            again = self._gathered_again(value, consumer, carrier)
            if again is not None:
                found += [again] if self._carrier_of(carrier, value) is through else []
                continue
            if carrier is not through:
                continue
            if consumer in self.recomputed and not self._same_unit(value[0], consumer):
                found += self._recompute_tasks.get(consumer, ())
                if self._is_kept_by_remade(value, consumer, at):
                    found += self.gradient_tasks(consumer, weights=self.input_for_weights(consumer, at))
            elif consumer not in self.recomputed and self.local.segment(consumer).inputs_saved[at]:
                found += self.gradient_tasks(consumer, weights=self.input_for_weights(consumer, at))
            elif self._is_leaf(value, consumer, through):
                found += self.gradient_tasks(consumer, weights=False)
        return found

    def _is_kept_by_remade(self, value: Value, consumer: int, at: int) -> bool:
        """Return whether an input of what is made again lives on until B: not if B has no use for it.

        What is also sent does: only B comes surely after that.
        """
        producer, output = value
        needs_gradient = self.local.segment(producer).outputs[output].requires_grad
        return needs_gradient or self.local.segment(consumer).inputs_saved[at] or self._is_sent(value)

    def _is_sent(self, value: Value) -> bool:
        uid = self._forward_uid.get(value[0])
        edges = () if uid is None else self.graph.outgoing.get(uid, ())
        targets = [self.graph.node[edge.target] for edge in edges if edge.target in self.position]
        return any(target.kind is TaskKind.SEND_F and self._carries(target, value) for target in targets)

    def _is_leaf(self, value: Value, consumer: int, through: Node | None) -> bool:
        """Return whether autograd begins anew at an input: it lives until its gradient is there.

        So it is with what another stage made, and between what is made again and what is not; exchanges
        within a stage belong to one graph.
        """
        producer, output = value
        if not self.local.segment(producer).outputs[output].requires_grad:
            return False
        if through is not None:
            return through.kind is TaskKind.RECV_F
        stages = self.graph.stage_of_segment
        if stages[producer] != stages[consumer]:
            return True
        return (producer in self.recomputed) != (consumer in self.recomputed)

    def _carrier(self, value: Value, consumer: int) -> Node | None:
        """Return the receive or exchange from which a segment's F takes a boundary tensor, or None."""
        return self._carrier_of(self.graph.node[self._forward_uid[consumer]], value)

    def _carrier_of(self, node: Node | None, value: Value) -> Node | None:
        """Return the receive or exchange from which a node takes a tensor; None: from its producer."""
        edges = () if node is None else self.graph.incoming.get(node.uid, ())
        sources = [self.graph.node[edge.source] for edge in edges]
        for source in sources:
            if source.is_exchange and value in source.values:
                return source
        for source in sources:
            if source.kind is TaskKind.RECV_F and value in self.graph.crossings[source.edge].values:
                return source
        return None

    def _gathered_again(self, value: Value, consumer: int, carrier: Node | None) -> int | None:
        """Return the exchange that brings back what a segment took from another one in F and threw away."""
        if carrier is None or consumer in self.recomputed:
            return None
        return self._again.get((carrier.region, value))

    @cached_property
    def _again(self) -> dict[tuple[tuple[int, int], Value], int]:
        """(region, boundary tensor) -> the exchange that gathers it once more for BW."""
        return {
            (node.region, value): position
            for position, node in enumerate(self.nodes)
            if node.is_exchange and node.phase is TaskKind.R
            for value in node.values
            if not any(self.graph.node[e.target].kind is TaskKind.R for e in self.graph.outgoing[node.uid])
        }

    def remade_for(self, value: Value, *, through: Node | None) -> list[int]:
        """Return the tasks of a unit that read a boundary tensor which the unit's R made again.

        `through`: the exchange behind R that they take it from (None: R itself).
        """
        found: list[int] = []
        for consumer, at in self.local.consumers.get(value, ()):
            if not self._same_unit(value[0], consumer):
                continue
            again = self.nodes[self._recompute_tasks[consumer][0]]
            carriers = [self.graph.node[e.source] for e in self.graph.incoming.get(again.uid, ())]
            carrier = next((n for n in carriers if n.is_exchange and value in n.values), None)
            if carrier is not through:
                continue
            found += self._recompute_tasks[consumer]
            if self.local.segment(consumer).inputs_saved[at]:
                found += self.gradient_tasks(consumer, weights=self.input_for_weights(consumer, at))
        return found

    def _same_unit(self, producer: int, consumer: int) -> bool:
        """Return whether two segments are made again together."""
        return (
            producer in self.recomputed
            and consumer in self.recomputed
            and self.local.unit_of[producer] == self.local.unit_of[consumer]
            and self.graph.stage_of_segment[producer] == self.graph.stage_of_segment[consumer]
        )

    def input_for_weights(self, consumer: int, at: int) -> bool:
        """Return whether BW reads an input that its segment saved."""
        return _flag(self.local.segment(consumer).inputs_saved_for_weights, at)

    def output_for_weights(self, value: Value) -> bool:
        """Return whether BW reads a boundary tensor that its own segment saved."""
        return _flag(self.local.segment(value[0]).outputs_saved_for_weights, value[1])

    def gradient_tasks(self, segment: int, *, weights: bool) -> list[int]:
        """Return the B or BI of a segment, and its BW when parameter gradients need the tensor too."""
        found = [self._backward_tasks[segment]] if segment in self._backward_tasks else []
        return found + (self.weight_tasks(segment) if weights else [])

    def late_tasks(self, value: Value, *, target: Node) -> list[int]:
        """Return the BW that reads a gradient which the BI `target` takes as it came, from one task."""
        if not self._is_late(value, target) or self._gradient_parts(value, target) != 1:
            return []
        return self.weight_tasks(value[0])

    def late_takers(self, value: Value, node: Node) -> list[int]:
        """Return the BW that read the gradient of an input as the BI `node` made it."""
        found: list[int] = []
        for consumer, at in self.local.consumers.get(value, ()):
            late = self.local.segment(consumer).input_gradients_for_weights
            if node.kind is TaskKind.BI and consumer in span(node) and late and late[at]:
                found += self.weight_tasks(consumer)
        return found

    def is_summed_for_weights(self, value: Value, node: Node) -> bool:
        """Return whether a BI makes, or sums up, the whole gradient of an output that BW reads."""
        return self._is_late(value, node) and self._gradient_parts(value, node) != 1

    def _is_late(self, value: Value, node: Node) -> bool:
        segment, output = value
        late = self.local.segment(segment).output_gradients_for_weights
        return node.kind is TaskKind.BI and segment in span(node) and bool(late) and late[output]

    def _gradient_parts(self, value: Value, node: Node) -> int:
        """Return from how many other tasks a BI takes parts of a gradient; 0 where it makes one itself."""
        if any(consumer in span(node) for consumer, _ in self.local.consumers.get(value, ())):
            return 0
        sources = [self.graph.node[edge.source] for edge in self.graph.incoming.get(node.uid, ())]
        return sum(source.uid in self.position and self._gives(source, value) for source in sources)

    def _gives(self, node: Node, value: Value) -> bool:
        """Return whether a task gives a gradient of a boundary tensor to what made it."""
        if node.kind is TaskKind.RECV_B:
            return value in self.graph.crossings[node.edge].grad_values
        if node.is_exchange:
            return node.phase in BACKWARD and value in node.values
        return node.kind in BACKWARD and any(value in self.local.segment(i).inputs for i in span(node))

    def weight_tasks(self, segment: int) -> list[int]:
        """Return the BW of a segment."""
        return [self._bw_tasks[segment]] if segment in self._bw_tasks else []

    def targets(self, node: Node) -> list[int]:
        """Return the tasks of the microbatch that come directly after a node."""
        outgoing = self.graph.outgoing.get(node.uid, ())
        return [self.position[edge.target] for edge in outgoing if edge.target in self.position]

    @cached_property
    def position(self) -> dict[str, int]:
        """Return positions by uid."""
        return {node.uid: i for i, node in enumerate(self.nodes)}

    def _by_segment(self, kinds: Iterable[TaskKind]) -> dict[int, int]:
        wanted = frozenset(kinds)
        return {s: i for i, node in enumerate(self.nodes) if node.kind in wanted for s in span(node)}

    @cached_property
    def forward_tasks(self) -> dict[int, int]:
        """Return the F of each segment."""
        return self._by_segment([TaskKind.F])

    @cached_property
    def _forward_uid(self) -> dict[int, str]:
        return {segment: self.nodes[i].uid for segment, i in self.forward_tasks.items()}

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
    def recomputed(self) -> frozenset[int]:
        """Segments of which everything is made again."""
        return frozenset(i for i in self._recompute_tasks if self.local.is_remade(i))


def _flag(stated: tuple[bool, ...], at: int) -> bool:
    """Return a flag of a captured segment; a segment that states none keeps all until BW."""
    return stated[at] if stated else True


def span(node: Node) -> range:
    """Return the segments of a compute node."""
    return range(node.first_segment, node.last_segment + 1)

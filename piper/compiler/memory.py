"""How many bytes each task of a stage brings to life, and which later task lets them go.

[Note: lifetimes]
Islands are numbered along the forward; their B run from the last to the first, so what several islands
need is freed by the lowest. From F to B live: tensors saved inside an island that is not recomputed, and
boundary tensors that a B or an R reads. From R to B: what a recomputed island saves. A received
activation lives to the lowest B that needs it, else to the end of F. A tensor that is only sent lives to
the end of its send. A gradient between two B lives from the first to the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from cost_models.ops import DTYPE_BYTES
from piper.graph import CapturedModel, Graph, Node
from simulator.plan import Edge, TaskKind, TensorSpec

Value = tuple[int, int]
"""(segment, output)."""


def spec_bytes(spec: TensorSpec) -> int:
    """Return the bytes of a boundary tensor."""
    return prod(spec.shape) * DTYPE_BYTES[spec.dtype]


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Lifetimes of one stage at one microbatch size.

    Args:
        graph: after the transfers pass.
        model: captured at that size.
        forward: the stage's F node.
        islands: its B nodes, along the forward.
    """

    graph: Graph
    model: CapturedModel
    forward: Node
    islands: tuple[Node, ...]

    @cached_property
    def kept_from_forward(self) -> tuple[int, ...]:
        """Return, per island, the bytes that F allocates and that island's B frees."""
        held = [0] * len(self.islands)
        for value, island in self._kept_until.items():
            held[island] += self.value_bytes(value)
        for number, node in enumerate(self.islands):
            if not node.recomputed:
                held[number] += self._saved(node)
        return tuple(held)

    @cached_property
    def kept_from_recompute(self) -> tuple[int, ...]:
        """Return, per island, the bytes that its R allocates and its B frees."""
        return tuple(
            self._saved(node) + sum(map(self.value_bytes, self._inside(node))) if node.recomputed else 0
            for node in self.islands
        )

    def received_until(self, crossing: Edge) -> int | None:
        """Return the lowest island whose B needs the received tensors, or None: F was the last reader."""
        needs = [island for value in crossing.values for island in self._readers(value)]
        return min(needs, default=None)

    def sent_bytes(self, crossing: Edge) -> int:
        """Return the bytes of tensors that live only until they are sent."""
        return sum(self.value_bytes(v) for v in crossing.values if v not in self._kept_until)

    def kept_islands_of_sent(self, crossing: Edge) -> tuple[int, ...]:
        """Return the islands whose kept bytes contain tensors of the crossing."""
        return tuple(sorted({self._kept_until[v] for v in crossing.values if v in self._kept_until}))

    def workspace_bytes(self, node: Node) -> int:
        """Return the largest transient bytes of a task of this stage."""
        if node.uid not in self._workspace_bytes:
            self._workspace_bytes[node.uid] = self._largest_workspace(node)
        return self._workspace_bytes[node.uid]

    @cached_property
    def _workspace_bytes(self) -> dict[str, int]:
        return {}

    def _largest_workspace(self, node: Node) -> int:
        numbers = range(node.first_segment, node.last_segment + 1)
        if node.kind is TaskKind.B:
            return max(self._backward_workspace(i, node) for i in numbers)
        recomputed = self._recomputed_segments if node.kind is TaskKind.F else frozenset()
        return max(self._forward_workspace(i, no_grad=i in recomputed) for i in numbers)

    def gradient_bytes(self, source: Node, target: Node) -> int:
        """Return the bytes of gradients that flow from one B to another B on the same device."""
        return sum(self.value_bytes(value) for value in gradient_values(self.model, source, target))

    def values_bytes(self, values: Iterable[Value]) -> int:
        """Return the bytes of several boundary tensors."""
        return sum(map(self.value_bytes, values))

    def value_bytes(self, value: Value) -> int:
        """Return the bytes of a boundary tensor of the model."""
        segment, output = value
        return spec_bytes(self.model.segments[segment].outputs[output])

    @cached_property
    def _island_of(self) -> Mapping[int, int]:
        return {
            segment: number
            for number, node in enumerate(self.islands)
            for segment in range(node.first_segment, node.last_segment + 1)
        }

    @cached_property
    def _recomputed_segments(self) -> frozenset[int]:
        return frozenset(s for s, island in self._island_of.items() if self.islands[island].recomputed)

    @cached_property
    def _consumers(self) -> Mapping[Value, tuple[tuple[int, int], ...]]:
        found: dict[Value, list[tuple[int, int]]] = {}
        for i, segment in enumerate(self.model.segments):
            for position, value in enumerate(segment.inputs):
                found.setdefault(value, []).append((i, position))
        return {value: tuple(users) for value, users in found.items()}

    @cached_property
    def _kept_until(self) -> Mapping[Value, int]:
        """Own boundary tensors that some B or R needs -> lowest island that does."""
        kept: dict[Value, int] = {}
        for i in range(self.forward.first_segment, self.forward.last_segment + 1):
            for output in range(len(self.model.segments[i].outputs)):
                needs = self._readers((i, output))
                if needs:
                    kept[i, output] = min(needs)
        return kept

    def _readers(self, value: Value) -> list[int]:
        """Return the islands of this stage that need the forward's copy of a tensor after F."""
        segment, output = value
        home = self._island_of.get(segment)
        needs: list[int] = []
        if home is not None and not self.islands[home].recomputed:
            if self.model.segments[segment].outputs_saved[output]:
                needs.append(home)
            if self._handed_over(value):
                needs.append(home)
        for consumer, position in self._consumers.get(value, ()):
            island = self._island_of.get(consumer)
            if island is None or (island == home and self.islands[island].recomputed):
                continue
            if self.islands[island].recomputed or self.model.segments[consumer].inputs_saved[position]:
                needs.append(island)
        return needs

    def _handed_over(self, value: Value) -> bool:
        """Return whether another stage of the same device reads the tensor (kept to our own B)."""
        homes, stage_of = self.graph.pipeline_rank_of_stage, self.graph.stage_of_segment
        own = self.forward.stage
        return any(
            stage_of[consumer] != own and homes[stage_of[consumer]] == homes[own]
            for consumer, _ in self._consumers.get(value, ())
        )

    def _inside(self, node: Node) -> list[Value]:
        """Return boundary tensors that a recomputed island makes again and some of its segments saved."""
        span = range(node.first_segment, node.last_segment + 1)
        return [
            (i, output)
            for i in span
            for output in range(len(self.model.segments[i].outputs))
            if self.model.segments[i].outputs_saved[output]
            or any(
                consumer in span and self.model.segments[consumer].inputs_saved[position]
                for consumer, position in self._consumers.get((i, output), ())
            )
        ]

    def _saved(self, node: Node) -> int:
        return sum(s.saved_bytes for s in self.model.segments[node.first_segment : node.last_segment + 1])

    def _forward_workspace(self, number: int, *, no_grad: bool) -> int:
        segment = self.model.segments[number]
        cost = segment.forward_no_grad if no_grad else segment.forward
        inputs = [v for v in segment.inputs if v[0] >= 0 and self._island_of.get(v[0]) is not None]
        outputs = [(number, output) for output in range(len(segment.outputs))]
        passing = {v for v in (*inputs, *outputs) if v not in self._kept_until}
        return cost.workspace_bytes + sum(map(self.value_bytes, sorted(passing)))

    def _backward_workspace(self, number: int, node: Node) -> int:
        segment = self.model.segments[number]
        span = range(node.first_segment, node.last_segment + 1)
        inner = [v for v in segment.inputs if v[0] in span]
        inner += [
            (number, output)
            for output in range(len(segment.outputs))
            if any(consumer in span for consumer, _ in self._consumers.get((number, output), ()))
        ]
        flowing = sum(
            self.value_bytes(v) for v in inner if self.model.segments[v[0]].outputs[v[1]].requires_grad
        )
        return segment.backward.workspace_bytes + flowing


def gradient_values(model: CapturedModel, source: Node, target: Node) -> tuple[Value, ...]:
    """Return the tensors whose gradients the B `source` (their consumer) hands to the B `target`."""
    found = {
        value: None
        for i in range(source.first_segment, source.last_segment + 1)
        for value in model.segments[i].inputs
        if target.first_segment <= value[0] <= target.last_segment
        and model.segments[value[0]].outputs[value[1]].requires_grad
    }
    return tuple(found)

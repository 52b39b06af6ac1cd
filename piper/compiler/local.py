"""`LocalModel`: what one rank computes and keeps of a captured model, after every cut of tensors and tokens.

[Note: local sizes]
Inside a region that tensor parallelism cuts, operations, kept activations and values between its segments
are 1/tp; with sequence parallelism what lies outside of the regions has 1/tp of the tokens, so it is 1/tp
too. Context parallelism leaves 1/cp of the tokens everywhere. Values that enter a region are whole (their
all-gather has run), values that leave it are whole partial sums (their reduce-scatter has not).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from cost_models.ops import DTYPE_BYTES, Operation, OpKind, cut
from piper.graph import CapturedModel, CapturedSegment, ExpertSharding, Graph
from simulator.plan import NONE, TaskKind, TensorSpec

Value = tuple[int, int]
"""(segment, output)."""


def spec_bytes(spec: TensorSpec) -> int:
    """Return the bytes of a boundary tensor."""
    return prod(spec.shape) * DTYPE_BYTES[spec.dtype]


@dataclass(frozen=True, kw_only=True)
class LocalModel:
    """One rank's share of a model.

    Args:
        graph: with the facts of all directives.
        model: captured at the size of the microbatch.
    """

    graph: Graph
    model: CapturedModel

    @cached_property
    def tensor_degree(self) -> tuple[int, ...]:
        """Return, per segment, over how many ranks its parameters and heads are cut."""
        degrees = [1] * len(self.model.segments)
        for sharding in self.graph.tensor_shardings:
            for segment in sharding.segments:
                degrees[segment] = self.graph.placed_mesh.size("tp")
        return tuple(degrees)

    @cached_property
    def token_degree(self) -> tuple[int, ...]:
        """Return, per segment, over how many ranks its tokens are cut."""
        mesh, stage_of = self.graph.placed_mesh, self.graph.stage_of_segment
        cp = mesh.size("cp") if self.graph.sequence_shardings else 1
        cut_stages = {
            stage_of[i] for s in self.graph.tensor_shardings if s.sequence_parallel for i in s.segments
        }
        return tuple(
            cp * (mesh.size("tp") if stage_of[i] in cut_stages and degree == 1 else 1)
            for i, degree in enumerate(self.tensor_degree)
        )

    @cached_property
    def expert_of(self) -> Mapping[int, ExpertSharding]:
        """Return the expert sharding of each segment that has one."""
        return {i: sharding for sharding in self.graph.expert_shardings for i in sharding.segments}

    def segment(self, number: int) -> CapturedSegment:
        """Return a captured segment."""
        return self.model.segments[number]

    def value_bytes(self, value: Value) -> int:
        """Return the bytes of a boundary tensor where it is made."""
        number, output = value
        spec = self.model.segments[number].outputs[output]
        size = spec_bytes(spec)
        if spec.batch_dim is None or len(spec.shape) == 1:
            return size
        parts = self.token_degree[number]
        if self.tensor_degree[number] > 1 and not self._leaves_region(value):
            parts *= self.tensor_degree[number]
        if number in self.expert_of:
            size = round(size * self.expert_of[number].imbalance)
        return -(-size // parts)

    def gathered_bytes(self, value: Value) -> int:
        """Return the bytes of a boundary tensor inside the tensor-parallel region that takes it."""
        number, output = value
        cp = self.graph.placed_mesh.size("cp") if self.graph.sequence_shardings else 1
        return -(-spec_bytes(self.model.segments[number].outputs[output]) // cp)

    def _leaves_region(self, value: Value) -> bool:
        return any(self.tensor_degree[c] == 1 for c, _ in self.consumers.get(value, ()))

    def saved_bytes(self, number: int, *, for_weights: bool) -> int:
        """Return what a segment keeps: until BW (`for_weights`), or only until B or BI."""
        segment = self.model.segments[number]
        weights = segment.saved_for_weights_bytes
        return self._share(number, weights if for_weights else segment.saved_bytes - weights)

    def gradients_for_weights_bytes(self, number: int) -> int:
        """Return what BI hands to BW."""
        return self._share(number, self.model.segments[number].gradients_for_weights_bytes)

    def workspace_bytes(self, number: int, kind: TaskKind, *, no_grad: bool = False) -> int:
        """Return the transient bytes of one pass of a segment."""
        segment = self.model.segments[number]
        cost = {
            TaskKind.F: segment.forward_no_grad if no_grad else segment.forward,
            TaskKind.R: segment.forward,
            TaskKind.B: segment.backward,
            TaskKind.BI: segment.backward_inputs,
            TaskKind.BW: segment.backward_weights,
        }[kind]
        return self._share(number, cost.workspace_bytes)

    def operations(self, number: int, kind: TaskKind, *, no_grad: bool = False) -> tuple[Operation, ...]:
        """Return the operations of one pass of a segment; equal segments share one tuple."""
        segment = self.model.segments[number]
        found = {
            TaskKind.F: segment.forward_no_grad if no_grad else segment.forward,
            TaskKind.R: segment.forward,
            TaskKind.B: segment.backward,
            TaskKind.BI: segment.backward_inputs,
            TaskKind.BW: segment.backward_weights,
        }[kind].operations
        parts = (self.tensor_degree[number], self.token_degree[number], number in self._ring_segments)
        if parts == (1, 1, False) and number not in self.expert_of:
            return found
        key = (id(found), *parts, self.expert_of.get(number))
        if key not in self._cut_operations:
            self._cut_operations[key] = tuple(self._cut(operation, number) for operation in found)
        return self._cut_operations[key]

    def parameter_numel(self, name: str) -> int:
        """Return the elements of a parameter that one rank holds."""
        numel = self._numel[name]
        for degree in self._parameter_parts.get(name, ()):
            numel = -(-numel // degree)
        return numel

    @cached_property
    def _numel(self) -> Mapping[str, int]:
        return {p.name: p.numel for p in self.model.parameters}

    @cached_property
    def _parameter_parts(self) -> Mapping[str, tuple[int, ...]]:
        parts: dict[str, tuple[int, ...]] = {}
        for number, segment in enumerate(self.model.segments):
            if number in self.expert_of:
                sharding = self.expert_of[number]
                parts |= dict.fromkeys(segment.parameters, (sharding.degree, sharding.tensor_degree))
            elif self.tensor_degree[number] > 1:
                layout = dict(segment.tensor_layout)
                cut_names = [name for name in segment.parameters if layout.get(name, NONE) != NONE]
                parts |= dict.fromkeys(cut_names, (self.tensor_degree[number],))
        return parts

    @cached_property
    def consumers(self) -> Mapping[Value, tuple[tuple[int, int], ...]]:
        """Return, per boundary tensor, the (segment, input position) pairs that take it."""
        found: dict[Value, list[tuple[int, int]]] = {}
        for i, segment in enumerate(self.model.segments):
            for position, value in enumerate(segment.inputs):
                found.setdefault(value, []).append((i, position))
        return {value: tuple(users) for value, users in found.items()}

    @cached_property
    def _cut_operations(self) -> dict[object, tuple[Operation, ...]]:
        return {}

    @cached_property
    def _ring_segments(self) -> frozenset[int]:
        return frozenset(i for s in self.graph.sequence_shardings for i in s.segments)

    def _share(self, number: int, size: int) -> int:
        if number in self.expert_of:
            size = round(size * self.expert_of[number].imbalance)
        return -(-size // (self.tensor_degree[number] * self.token_degree[number]))

    def _cut(self, operation: Operation, number: int) -> Operation:
        """Return one rank's share of an operation ([Note: local sizes])."""
        tensor, tokens = self.tensor_degree[number], self.token_degree[number]
        swapped = number in self._ring_segments and self._method_of(number) == "all_to_all"
        if swapped and operation.kind is OpKind.ATTENTION:
            tensor, tokens = tensor * self.graph.placed_mesh.size("cp"), 1
        if tensor > 1 and operation.tensor_dim != NONE:
            operation = cut(operation, operation.tensor_dim, tensor)
        if tokens > 1 and operation.token_dim != NONE:
            operation = cut(operation, operation.token_dim, tokens)
        return operation

    def _method_of(self, number: int) -> str:
        return next(s.method for s in self.graph.sequence_shardings if number in s.segments)

    def values_bytes(self, values: Iterable[Value]) -> int:
        """Return the bytes of several boundary tensors where they are made."""
        return sum(map(self.value_bytes, values))

"""`LocalModel`: what one rank computes and keeps of a captured model, after every cut of tensors and tokens.

[Note: local sizes]
Inside a region that tensor parallelism cuts, operations, kept activations and values between its segments
are 1/tp; with sequence parallelism what lies outside of the regions has 1/tp of the tokens, so it is 1/tp
too. Context parallelism leaves 1/cp of the tokens everywhere. Values that enter a region are whole (their
all-gather has run), values that leave it are whole partial sums (their reduce-scatter has not). The fullest
rank of experts takes `imbalance` (at most `capacity`) times the mean rows; the ranks that share an expert
(etp) take the same rows.

[Note: core attention]
Selective recomputation of attention and softmax makes a segment tagged CP again as a whole: where attention
is not one kernel, scores, softmax and dropout all follow from queries and keys (Korthikanti et al. 2022,
arXiv 2205.05198, section 5).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod

from cost_models.ops import DTYPE_BYTES, Operation, OpKind, cut, kept_dtype, resize
from piper.graph import (
    CapturedModel,
    CapturedSegment,
    ExpertSharding,
    Graph,
    Node,
    Recomputation,
    Shares,
    units_of,
)
from piper.graph.shares import gathers_features, normalises_cut_features
from simulator.plan import NONE, Edge, TaskKind, TensorSpec

Value = tuple[int, int]
"""(segment, output)."""

TOKEN_BYTES = 8
"""Tokens and labels are int64 (`torch.nn.functional.embedding` and `cross_entropy` take them so)."""
_ROW_NUMBERS = 3
"""Maximum, sum of exponentials, and the wanted entry."""
_HEADS = 1
"""Position of the heads in the shape of attention."""
_LINEAR = frozenset({"aten.mm.default", "aten.addmm.default"})
"""Operators of linear layers."""
_CORE = frozenset({OpKind.ATTENTION.value, OpKind.SOFTMAX.value})
"""Kinds that selective recomputation makes again where nothing else is asked."""


def spec_bytes(spec: TensorSpec) -> int:
    """Return the bytes of a boundary tensor."""
    return prod(spec.shape) * DTYPE_BYTES[spec.dtype]


@dataclass(frozen=True, kw_only=True)
class LocalModel:
    """One rank's share of a model.

    Args:
        graph: with the facts of all directives.
        model: captured at the size of the microbatch on a replica of `stage`.
        stage: whose rank it is; others with its mesh share it.
    """

    graph: Graph
    model: CapturedModel
    stage: int = 0

    @cached_property
    def shares(self) -> Shares:
        """Return over how many ranks everything is cut."""
        return Shares(graph=self.graph)

    def segment(self, number: int) -> CapturedSegment:
        """Return a captured segment."""
        return self.model.segments[number]

    def value_bytes(self, value: Value) -> int:
        """Return the bytes of a boundary tensor where it is made."""
        number, _ = value
        if number in self.shares.expert_of:
            return self._expert_bytes(value, number)
        if self.shares.tensor_degree[number] > 1:
            whole = self.gathered_bytes(value)
            return whole if self._leaves_region(value) else self._cut(value, whole)
        return self.outside_bytes(value)

    def outside_bytes(self, value: Value) -> int:
        """Return the bytes of a boundary tensor between regions, and between stages."""
        return self._divided(value, self.shares.outside_of_stage(self.stage))

    def model_input_bytes(self, number: int) -> int:
        """Return the bytes of the tokens or labels that a segment takes, [microbatch, seq]."""
        tokens = self.model.micro_batch * self.model.seq_len
        return -(-tokens // self.shares.context_degree[number]) * TOKEN_BYTES

    def outside_values_bytes(self, values: Iterable[Value]) -> int:
        """Return the bytes of several boundary tensors between stages."""
        return sum(map(self.outside_bytes, values))

    def message_bytes(self, edge: Edge, values: Iterable[Value]) -> int:
        """Return the bytes of a transfer: the share of a rank of the finer end (`piper.graph.regrouping`)."""
        ours = self.graph.axis_size("dp", stage=self.stage)
        finest = max((edge.source_stage, edge.target_stage), key=self._replicas)
        pieces = max(1, self._replicas(finest) // ours)
        parts = pieces * self.shares.outside_of_stage(finest)
        return sum(self._divided(value, parts) for value in values)

    def _replicas(self, stage: int) -> int:
        return self.graph.axis_size("dp", stage=stage)

    def gathered_bytes(self, value: Value) -> int:
        """Return the bytes of a boundary tensor inside the tensor-parallel region that takes it."""
        return self._divided(value, self.shares.context_degree[value[0]])

    def values_bytes(self, values: Iterable[Value]) -> int:
        """Return the bytes of several boundary tensors where they are made."""
        return sum(map(self.value_bytes, values))

    def exchange_bytes(self, node: Node, value: Value) -> tuple[int, int]:
        """Return the bytes of a boundary tensor (B: of its gradient) before and behind an exchange."""
        inside, outside = self._sides(node, value)
        return (outside, inside) if _inwards(node) else (inside, outside)

    def exchanged_bytes(self, node: Node) -> int:
        """Return `size_bytes` of an exchange, as its kind counts them (`CollectiveKind`)."""
        if node.kind is TaskKind.RING_SHIFT:
            return self._ring_bytes(node)
        if not node.values:
            return self._row_bytes(node) if node.kind is TaskKind.ALL_REDUCE else self._feature_bytes(node)
        sizes = [self.exchange_bytes(node, value) for value in node.values]
        if node.kind in {TaskKind.ALL_GATHER, TaskKind.REDUCE_SCATTER}:
            return sum(max(size) for size in sizes)
        if node.kind is TaskKind.ALL_TO_ALL and node.group.startswith("ep"):
            return sum(self._sent_to_experts(node, value) for value in node.values)
        if node.is_regrouping:
            return sum(max(size) for size in sizes)
        return sum(before for before, _ in sizes)

    def ring_buffer_bytes(self, node: Node) -> int:
        """Return what a ring shift holds: the piece that arrives and the one that leaves."""
        shifts = self.shares.context_degree[node.region[0]] - 1
        return min(2, shifts) * self._ring_bytes(node) // shifts

    def saved_bytes(self, number: int, *, for_weights: bool) -> int:
        """Return what a segment keeps: until BW (`for_weights`), or only until B or BI."""
        segment = self.model.segments[number]
        weights, whole = segment.saved_for_weights_bytes, segment.saved_whole_bytes
        if for_weights:
            return self._share(number, weights)
        if self.shares.tensor_degree[number] == 1:
            return self._share(number, segment.saved_bytes - weights - segment.saved_gathers_bytes)
        tokens = self.shares.token_degree[number]
        return -(-whole // tokens) + self._share(number, segment.saved_bytes - weights - whole)

    def remade_bytes(self, number: int, *, for_weights: bool) -> int:
        """Return what of `saved_bytes` F throws away and R makes again."""
        if self.is_remade(number):
            return self.saved_bytes(number, for_weights=for_weights)
        rule = self._selective.get(number)
        if rule is None:
            return 0
        rows, whole = self.model.segments[number].saved_by_kind, self._makes_core_again(number, rule)
        chosen = [row for row in rows if whole or row[0] in rule.kinds]
        weights = sum(late for _, _, late in chosen)
        return self._share(number, weights if for_weights else sum(size for _, size, _ in chosen) - weights)

    def offloaded(self, node: Node) -> list[int]:
        """Return the segments whose activations a copy to or from the host moves."""
        claimed = {i for f in self.graph.offloadings if f.what == "activations" for i in f.segments}
        return [i for i in range(node.region[0], node.region[1] + 1) if i in claimed]

    def offloaded_bytes(self, node: Node) -> int:
        """Return the bytes of a copy of activations."""
        return sum(
            self.saved_bytes(i, for_weights=late) - self.remade_bytes(i, for_weights=late)
            for i in self.offloaded(node)
            for late in (False, True)
        )

    def is_remade(self, number: int) -> bool:
        """Return whether F throws away all inside a segment, and outputs that only its unit reads."""
        return number in self._remade

    def gradients_for_weights_bytes(self, number: int) -> int:
        """Return what BI hands to BW."""
        return self._share(number, self.model.segments[number].gradients_for_weights_bytes)

    def workspace_bytes(self, number: int, kind: TaskKind, *, no_grad: bool = False) -> int:
        """Return the transient bytes of one pass of a segment."""
        if kind is TaskKind.R and not self.is_remade(number):
            return 0  # what some kinds of operations make again is kept, not transient
        segment = self.model.segments[number]
        cost = {
            TaskKind.F: segment.forward_no_grad if no_grad else segment.forward,
            TaskKind.R: segment.forward,
            TaskKind.B: segment.backward,
            TaskKind.BI: segment.backward_inputs,
            TaskKind.BW: segment.backward_weights,
        }[kind]
        whole = cost.workspace_whole_bytes if number in self.shares.tensor_of else 0
        tokens = self.shares.token_degree[number]
        of_experts, own = self._expert_gradient_bytes(number, kind)
        of_experts = min(of_experts, cost.workspace_bytes)
        rest = self._share(number, cost.workspace_bytes - whole - of_experts)
        return -(-whole // tokens) + rest + min(own, of_experts)

    def _expert_gradient_bytes(self, number: int, kind: TaskKind) -> tuple[int, int]:
        """Return the gradients of the experts of a segment that B or BW makes: of all, and of one rank's."""
        if number not in self.shares.expert_of or kind not in {TaskKind.B, TaskKind.BW}:
            return 0, 0
        trained = self.model.trained_numel
        names = [name for name in self.model.segments[number].parameters if name in trained]
        element = DTYPE_BYTES[kept_dtype(self.graph.dtype)]
        return (
            element * sum(trained[name] for name in names),
            element * sum(self.parameter_numel(name) for name in names),
        )

    def operations(self, number: int, kind: TaskKind, *, no_grad: bool = False) -> tuple[Operation, ...]:
        """Return the operations of one pass of a segment; equal segments share one tuple."""
        if kind is TaskKind.R and not self.is_remade(number):
            return self._selected(number)
        if kind is TaskKind.R and number in self._kept_results:
            return self._made_again(number)
        segment = self.model.segments[number]
        found = {
            TaskKind.F: segment.forward_no_grad if no_grad else segment.forward,
            TaskKind.R: segment.forward,
            TaskKind.B: segment.backward,
            TaskKind.BI: segment.backward_inputs,
            TaskKind.BW: segment.backward_weights,
        }[kind].operations
        shares = self.shares
        expert, sequence = shares.expert_of.get(number), shares.sequence_of.get(number)
        tensor, tokens = shares.tensor_degree[number], shares.token_degree[number]
        if tensor == 1 and any(map(gathers_features, found)):
            found = self._ungathered(found)
        if tensor == tokens == 1 and expert is None:
            return found
        key = (id(found), tensor, tokens, expert, sequence)
        if key not in self._cut_operations:
            self._cut_operations[key] = tuple(self._local(operation, number) for operation in found)
        return self._cut_operations[key]

    def kept_result_bytes(self, number: int) -> int:
        """Return the results that a segment keeps although the rest of it is made again."""
        kept = self._kept_results.get(number, {})
        return sum(_result_bytes(operation) * count for operation, count in kept.items())

    def _ungathered(self, found: tuple[Operation, ...]) -> tuple[Operation, ...]:
        """Return the operations of one rank that has all features: it gathers nothing."""
        key = (id(found), "ungathered")
        if key not in self._cut_operations:
            self._cut_operations[key] = tuple(o for o in found if not gathers_features(o))
        return self._cut_operations[key]

    def parameter_numel(self, name: str) -> int:
        """Return the elements of a parameter that one rank holds."""
        return self.shares.local_numel((name,))

    def _selected(self, number: int) -> tuple[Operation, ...]:
        """Return the operations of the forward that a selective recomputation makes again."""
        rule = self._selective.get(number)
        if rule is None:
            return ()
        forward = self.operations(number, TaskKind.F)
        key = (id(forward), rule.kinds, self._makes_core_again(number, rule))
        if key not in self._cut_operations:
            whole = self._makes_core_again(number, rule)
            self._cut_operations[key] = tuple(o for o in forward if whole or o.kind.value in rule.kinds)
        return self._cut_operations[key]

    def _makes_core_again(self, number: int, rule: Recomputation) -> bool:
        """Return whether a segment is attention that is made again as a whole [Note: core attention]."""
        tags = dict(self.model.segments[number].tags)
        return "CP" in tags and frozenset(rule.kinds) >= _CORE

    @cached_property
    def unit_of(self) -> tuple[int, ...]:
        """Return the unit of the cut of every segment: what is recomputed together."""
        return units_of(self.model).of_segment

    @cached_property
    def _remade(self) -> frozenset[int]:
        """Segments that an R makes again as a whole."""
        again = [n for n in self.graph.nodes if n.kind is TaskKind.R and n.recomputed]
        return frozenset(i for n in again for i in range(n.first_segment, n.last_segment + 1))

    def _made_again(self, number: int) -> tuple[Operation, ...]:
        """Return the forward of a segment without the kernels whose results are kept."""
        forward, kept = self.operations(number, TaskKind.F), self._kept_results[number]
        key = (id(forward), "made again", tuple(kept.values()))
        if key not in self._cut_operations:
            left = [(o, o.count - kept.get(o, 0)) for o in forward]
            self._cut_operations[key] = tuple(replace(o, count=count) for o, count in left if count)
        return self._cut_operations[key]

    @cached_property
    def _kept_results(self) -> Mapping[int, Mapping[Operation, int]]:
        """By segment, the kernels whose results are kept where the others are made again, and how often.

        Attention, and of the linear layers of a unit the first, third, ... .
        """
        claimed = [i for f in self.graph.recomputations if f.mode == "ops" for i in f.segments]
        found: dict[int, dict[Operation, int]] = {}
        passed: Counter[int] = Counter()
        for number in sorted(claimed):
            unit, found[number] = self.unit_of[number], {}
            for operation in self.operations(number, TaskKind.F):
                if operation.kind is OpKind.ATTENTION:
                    found[number][operation] = operation.count
                elif operation.name in _LINEAR:
                    before, passed[unit] = passed[unit], passed[unit] + operation.count
                    found[number][operation] = (passed[unit] + 1) // 2 - (before + 1) // 2
        return found

    @cached_property
    def _selective(self) -> Mapping[int, Recomputation]:
        facts = [fact for fact in self.graph.recomputations if fact.mode == "selective"]
        return {i: fact for fact in facts for i in fact.segments}

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

    def _spec(self, value: Value) -> TensorSpec:
        return self.model.segments[value[0]].outputs[value[1]]

    def _divided(self, value: Value, parts: int) -> int:
        """Return the bytes of a tensor whose tokens are cut; what has no microbatch dimension is whole."""
        spec = self._spec(value)
        return spec_bytes(spec) if spec.batch_dim is None else -(-spec_bytes(spec) // parts)

    def _cut(self, value: Value, whole: int) -> int:
        """Return the bytes of a tensor inside a tensor-parallel region: its own features or heads."""
        return (
            whole if self._spec(value).batch_dim is None else -(-whole // self.shares.tensor_degree[value[0]])
        )

    def _leaves_region(self, value: Value) -> bool:
        home = self.shares.region("tp", value[0])
        return any(self.shares.region("tp", c) != home for c, _ in self.consumers.get(value, ()))

    def _sides(self, node: Node, value: Value) -> tuple[int, int]:
        """Return the bytes of a tensor inside and outside of the region at whose border an exchange is."""
        if node.group.startswith("ep"):
            region = self._taker(value, "ep") if node.enters else value[0]
            return self._expert_bytes(value, region), self.outside_bytes(value)
        if node.is_regrouping:
            parts = node.pieces * self.shares.outside_of_stage(self.stage)
            return self.outside_bytes(value), self._divided(value, parts)
        if node.group.startswith("cp"):
            made = self.value_bytes(value)
            return made, made
        return self.gathered_bytes(value), self.outside_bytes(value)

    def _taker(self, value: Value, axis: str) -> int:
        return next(c for c, _ in self.consumers[value] if self.shares.region(axis, c) is not None)

    def _expert_bytes(self, value: Value, number: int) -> int:
        """Return the bytes of a tensor of tokens on the fullest rank of the experts of segment `number`."""
        size = self.outside_bytes(value)
        if self._spec(value).batch_dim is None:
            return size
        fact = self.shares.expert_of[number]
        return ceil(size * fact.tensor_degree * _fullest(fact))

    def _sent_to_experts(self, node: Node, value: Value) -> int:
        """Return the send buffer of the fullest rank: each row goes to all ranks that share an expert."""
        before, behind = self.exchange_bytes(node, value)
        region = self._taker(value, "ep") if node.enters else value[0]
        fact = self.shares.expert_of[region]
        return max(before * fact.tensor_degree, behind) if _inwards(node) else before

    def _row_bytes(self, node: Node) -> int:
        """Return what ranks of tp agree on for the rows of a cut softmax: three fp32 numbers each."""
        operations = self.operations(node.region[0], TaskKind.F)
        rows = max(o.shape[0] for o in operations if normalises_cut_features(o))
        return _ROW_NUMBERS * rows * DTYPE_BYTES["fp32"]

    def _feature_bytes(self, node: Node) -> int:
        """Return the bytes of the features that a region gathers; its kernels read and write them."""
        operations = self.operations(node.region[0], TaskKind.F)
        return max(o.bytes // 2 for o in operations if gathers_features(o))

    def _ring_bytes(self, node: Node) -> int:
        """Return what a rank passes on in one pass: cp - 1 times keys and values, in B gradients too."""
        total = 0
        for number in range(node.region[0], node.region[1] + 1):
            cp = self.shares.context_degree[number]
            for operation in self.operations(number, TaskKind.F):
                if operation.kind is OpKind.ATTENTION:
                    batch, _, kv_heads, _, seq_kv, head_dim = operation.shape
                    piece = 2 * batch * kv_heads * -(-seq_kv // cp) * head_dim * DTYPE_BYTES[operation.dtype]
                    total += (cp - 1) * piece * operation.count
        return total * (2 if node.phase is TaskKind.B else 1)

    def _share(self, number: int, size: int) -> int:
        shares = self.shares
        if number in shares.expert_of:
            fact = shares.expert_of[number]
            # The ranks that share an expert take the same rows, and each a part of their features.
            return ceil(size * _fullest(fact) / shares.token_degree[number])
        return -(-size // (shares.tensor_degree[number] * shares.token_degree[number]))

    def _local(self, operation: Operation, number: int) -> Operation:
        """Return one rank's share of an operation ([Note: local sizes])."""
        shares = self.shares
        tensor, tokens = shares.tensor_degree[number], shares.token_degree[number]
        if number in shares.expert_of:
            return _of_experts(operation, shares.expert_of[number], tokens)
        if tensor > 1:
            operation = cut(operation, operation.tensor_dim, tensor)
        sequence = shares.sequence_of.get(number)
        if sequence is None or operation.kind is not OpKind.ATTENTION:
            return cut(operation, operation.token_dim, tokens)
        context = shares.context_degree[number]
        if sequence.method == "all_to_all":
            return cut(cut(operation, _HEADS, context), operation.token_dim, tokens // context)
        operation = cut(operation, operation.token_dim, tokens)
        if sequence.balanced or not operation.causal:
            return operation
        # The last of cp pieces sees all keys but half of its own: (cp - 1/2) / (cp / 2) of the mean.
        return replace(operation, flops=ceil(operation.flops * (2 * context - 1) / context))


def _result_bytes(operation: Operation) -> int:
    """Return what a linear layer, or attention with its fp32 number per row, makes.

    The result of a product of 1-byte numbers has 2 bytes (`cost_models.low_precision`).
    """
    element = max(DTYPE_BYTES[operation.dtype], DTYPE_BYTES["bf16"])
    if operation.kind is OpKind.ATTENTION:
        batch, heads, _, seq, _, head_dim = operation.shape
        return batch * heads * seq * (head_dim * element + DTYPE_BYTES["fp32"])
    batch, rows, columns, _ = operation.shape
    return batch * rows * columns * element


def _inwards(node: Node) -> bool:
    """Return whether an exchange takes tensors (B: gradients) into its region."""
    return node.enters is (node.phase is not TaskKind.B)


def _fullest(fact: ExpertSharding) -> float:
    """Return tokens on the fullest rank of experts / mean."""
    return fact.imbalance if fact.capacity is None else min(fact.imbalance, fact.capacity)


def _of_experts(operation: Operation, fact: ExpertSharding, tokens: int) -> Operation:
    """Return the work of the fullest rank: fewer experts, as many rows x imbalance."""
    if operation.token_dim != NONE:
        rows = operation.shape[operation.token_dim] * fact.tensor_degree
        operation = resize(operation, operation.token_dim, ceil(rows * _fullest(fact) / tokens))
    if operation.kind in {OpKind.GROUPED_MATMUL, OpKind.QUANTISATION}:
        operation = cut(operation, 0, fact.degree)
    return cut(operation, operation.tensor_dim, fact.tensor_degree)

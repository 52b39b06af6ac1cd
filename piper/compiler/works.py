"""What each task computes: operations of its segments, joined into the price keys of the plan."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from cost_models.ops import DTYPE_BYTES, Operation, OpKind, merge_equal
from piper.compiler.local import LocalModel
from piper.graph import Graph, Node
from simulator.plan import NONE, Bucket, TaskKind, Work

_FULL_SHARDS = 2
"""From ZeRO 2 on a rank keeps gradients of its shard only."""


@dataclass(slots=True)
class WorkTable:
    """Distinct works in order of first use; equal operation lists share one entry."""

    graph: Graph
    works: list[Work] = field(default_factory=list)
    _index: dict[tuple[Operation, ...], int] = field(default_factory=dict)
    _of_node: dict[tuple[str, int], int] = field(default_factory=dict)
    _of_lists: dict[tuple[object, ...], int] = field(default_factory=dict)
    _locals: dict[int, LocalModel] = field(default_factory=dict)

    def of_compute(self, node: Node, micro_batch: int) -> int:
        """Return the work of an F, B, BI, BW or R node at one microbatch size (of the job's mesh)."""
        key = (node.uid, micro_batch)
        if key not in self._of_node:
            local = self._local(self.graph.local_batch(micro_batch, stage=node.stage))
            lists, summed = _lists(local, node), _summed(local, node)
            # Equal layers have the same tuples of operations, which the model or the local model keeps.
            alike = (local.model.micro_batch, tuple(map(id, lists)), summed)
            if alike not in self._of_lists:
                operations = _operations(local, lists, summed)
                self._of_lists[alike] = self._add(_label(local, node), operations)
            self._of_node[key] = self._of_lists[alike]
        return self._of_node[key]

    def of_norm(self, buckets: tuple[Bucket, ...]) -> int:
        """Return the work of the sum of squares over the gradients that one rank holds."""
        dtype = self.graph.state_dtypes.gradient
        elements = [b.padded_numel // b.shard_count for b in buckets if b.kind != "tied"]
        return self._add("NORM", merge_equal(_sum_of_squares(count, dtype) for count in elements))

    def of_update(self, bucket: Bucket) -> int:
        """Return the work of the optimizer on one bucket, gradients set to zero included."""
        owned = bucket.padded_numel // bucket.shard_count
        states = self.graph.state_dtypes
        update = Operation(
            kind=OpKind.OPTIMIZER,
            name=self.graph.optimizer,
            shape=(owned,),
            dtype="fp32",
            flops=0,
            bytes=owned * states.update_bytes(self.graph.optimizer, bucket.zero),
        )
        cleared = owned if bucket.zero >= _FULL_SHARDS else bucket.padded_numel
        zero = Operation(
            kind=OpKind.ELEMENTWISE,
            name="zero_gradients",
            shape=(cleared,),
            dtype=states.gradient,
            flops=0,
            bytes=cleared * DTYPE_BYTES[states.gradient],
        )
        return self._add(f"UPDATE {bucket.name}", (update, zero))

    def _local(self, micro_batch: int) -> LocalModel:
        if micro_batch not in self._locals:
            model = next(m for m in self.graph.models if m.micro_batch == micro_batch)
            self._locals[micro_batch] = LocalModel(graph=self.graph, model=model)
        return self._locals[micro_batch]

    def _add(self, label: str, operations: tuple[Operation, ...]) -> int:
        if not operations:
            return NONE
        if operations not in self._index:
            self._index[operations] = len(self.works)
            self.works.append(Work(label=label, operations=operations))
        return self._index[operations]


def _lists(local: LocalModel, node: Node) -> list[tuple[Operation, ...]]:
    """Return the operations of each segment of a task."""
    return [
        local.operations(number, node.kind, no_grad=node.kind is TaskKind.F and local.is_remade(number))
        for number in range(node.first_segment, node.last_segment + 1)
    ]


def _summed(local: LocalModel, node: Node) -> tuple[int, ...]:
    """Return the elements of each parameter to whose gradient a task adds."""
    if node.kind not in {TaskKind.B, TaskKind.BW}:
        return ()
    numbers, trained = range(node.first_segment, node.last_segment + 1), local.model.trained_numel
    names = [name for number in numbers for name in local.segment(number).parameters if name in trained]
    if local.graph.sums_in_products:
        made = {name for number in numbers for name in _made_by_products(local, number)}
        names = [name for name in names if name not in made]
    return tuple(local.parameter_numel(name) for name in names)


def _made_by_products(local: LocalModel, number: int) -> list[str]:
    """Return the weights of a segment whose gradients are products: of as many elements as one of those."""
    segment = local.model.segments[number]
    made = {_elements_made(op) for op in segment.backward.operations if op.direction == "wgrad"}
    numel = local.model.trained_numel
    return [name for name in segment.parameters if numel.get(name) in made]


def _elements_made(product: Operation) -> int | None:
    if product.kind is OpKind.MATMUL:
        return math.prod(product.shape[:-1])
    if product.kind is OpKind.GROUPED_MATMUL:
        groups, _, columns, inner = product.shape
        return groups * columns * inner
    return None


def _operations(
    local: LocalModel, lists: list[tuple[Operation, ...]], summed: tuple[int, ...]
) -> tuple[Operation, ...]:
    found: list[Operation] = []
    # Equal segments share one tuple of operations, so a stage of many layers is joined layer by layer kind.
    times = Counter(id(operations) for operations in lists)
    for operations in {id(operations): operations for operations in lists}.values():
        found += merge_equal(operations, times=times[id(operations)])
    gradient = local.graph.state_dtypes.gradient
    found += [_accumulate(numel, local.model.dtype, gradient) for numel in summed]
    return merge_equal(found)


def _accumulate(numel: int, dtype: str, summed: str) -> Operation:
    moved = DTYPE_BYTES[dtype] + 2 * DTYPE_BYTES[summed]
    return Operation(
        kind=OpKind.ELEMENTWISE,
        name="accumulate_gradient",
        shape=(numel,),
        dtype=summed,
        flops=numel,
        bytes=numel * moved,
        direction="bwd",
    )


def _sum_of_squares(elements: int, dtype: str) -> Operation:
    return Operation(
        kind=OpKind.REDUCTION,
        name="sum_of_squares",
        shape=(elements,),
        dtype=dtype,
        flops=2 * elements,
        bytes=elements * DTYPE_BYTES[dtype],
    )


def _label(local: LocalModel, node: Node) -> str:
    first, last = local.segment(node.first_segment).name, local.segment(node.last_segment).name
    return f"{node.kind.name} {first}" + ("" if first == last else f" .. {last}")

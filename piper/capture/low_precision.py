"""A model captured in bf16 -> the same with its linear layers in a low precision.

[Note: low precision] in `cost_models/low_precision.py`. The head, the last product before the loss, stays in
bf16, as Megatron-LM and torchtitan leave it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from cost_models.low_precision import quantised
from cost_models.ops import Operation, OpKind, merge_equal
from piper.graph.captured import CapturedModel, CapturedSegment, PassCost

_LINEAR = frozenset({"aten.mm.default", "aten.addmm.default"})


def in_low_precision(model: CapturedModel, dtype: str) -> CapturedModel:
    """Return a model whose linear layers compute in `dtype`, a key of `cost_models.ops.OPERAND_BITS`."""
    head = _head(model)
    known: dict[int, PassCost] = {}
    segments = []
    for number, segment in enumerate(model.segments):
        if head is not None and number == head[0]:
            segments.append(_changed(segment, partial(_pass, dtype=dtype, kept=head[1])))
        else:
            segments.append(_changed(segment, partial(_known_pass, dtype=dtype, known=known)))
    return replace(model, segments=tuple(segments))


def _changed(segment: CapturedSegment, change: Callable[[PassCost], PassCost]) -> CapturedSegment:
    return replace(
        segment,
        forward=change(segment.forward),
        forward_no_grad=change(segment.forward_no_grad),
        backward=change(segment.backward),
        backward_inputs=change(segment.backward_inputs),
        backward_weights=change(segment.backward_weights),
    )


def _known_pass(cost: PassCost, *, dtype: str, known: dict[int, PassCost]) -> PassCost:
    """Change a pass that repeated blocks share once."""
    if id(cost) not in known:
        known[id(cost)] = _pass(cost, dtype=dtype, kept=())
    return known[id(cost)]


def _pass(cost: PassCost, *, dtype: str, kept: tuple[int, ...]) -> PassCost:
    """Return a pass in a low precision, apart from products whose sizes are `kept`."""
    operations: list[Operation] = []
    for operation in cost.operations:
        if _is_linear(operation) and _sizes(operation) != kept:
            operations += quantised(operation, dtype)
        else:
            operations.append(operation)
    return replace(cost, operations=merge_equal(operations))


def _head(model: CapturedModel) -> tuple[int, tuple[int, ...]] | None:
    """Return the segment with the last linear layer of F, and that layer's sizes in any order."""
    for number in reversed(range(len(model.segments))):
        products = [o for o in _forward(model.segments[number]) if _is_linear(o)]
        if products:
            return number, _sizes(products[-1])
    return None


def _forward(segment: CapturedSegment) -> tuple[Operation, ...]:
    return segment.forward.operations


def _is_linear(operation: Operation) -> bool:
    return operation.kind is OpKind.GROUPED_MATMUL or operation.name in _LINEAR


def _sizes(operation: Operation) -> tuple[int, ...]:
    """Return the sizes of a product, the same for its two gradients."""
    return tuple(sorted(operation.shape))

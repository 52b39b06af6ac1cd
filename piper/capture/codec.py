"""`CapturedModel` as JSON, both ways: equal operations, passes and segment bodies are written once.

A layout lists the parameters of its segment in their order, or none: their names are not written again.
Kernels of a pass that are equal may be written one by one: they are joined when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from cost_models.ops import Operation, OpKind, merge_equal
from piper.graph.captured import CapturedModel, CapturedSegment, PassCost, SavedTensor
from simulator.plan import LayerFacts, ModelFacts, Parameter, TensorSpec

FORMAT = 9

PASSES = ("forward", "forward_no_grad", "backward", "backward_inputs", "backward_weights")
"""Passes of a segment; a body starts with their numbers."""

_SIZES = ("saved_bytes", "saved_whole_bytes", "saved_gathers_bytes", "saved_for_weights_bytes",
          "gradients_for_weights_bytes")  # fmt: skip
_FLAGS = (
    "inputs_saved",
    "outputs_saved",
    "inputs_saved_for_weights",
    "outputs_saved_for_weights",
    "output_gradients_for_weights",
    "input_gradients_for_weights",
)
"""Fields of a segment that equal segments share."""


class _Table:
    """Numbers equal rows in order of first appearance."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._number: dict[Any, int] = {}

    def number(self, key: Any, row: Any) -> int:
        found = self._number.get(key)
        if found is None:
            found = self._number[key] = len(self.rows)
            self.rows.append(row)
        return found


Details = Callable[[PassCost], tuple[Sequence[Operation], list[Any]]]
"""Returns the operations of a pass, and what else is written of it."""


def _plain(cost: PassCost) -> tuple[Sequence[Operation], list[Any]]:
    return cost.operations, [cost.workspace_bytes, cost.workspace_whole_bytes]


def to_json(model: CapturedModel, *, details: Details = _plain) -> dict[str, Any]:
    """Return the JSON object of a captured model.

    Args:
        model: what to write.
        details: what to write of a pass; `from_json` reads the default.
    """
    operations, passes, bodies = _Table(), _Table(), _Table()
    known: dict[int, int] = {}

    def number_of(cost: PassCost) -> int:
        if id(cost) not in known:
            kernels, rest = details(cost)
            row = [[operations.number(op, _operation_row(op)) for op in kernels], *rest]
            known[id(cost)] = passes.number(repr(row), row)
        return known[id(cost)]

    segments = []
    for segment in model.segments:
        body = [
            *(number_of(getattr(segment, name)) for name in PASSES),
            *(getattr(segment, name) for name in _SIZES),
            *(list(getattr(segment, name)) for name in _FLAGS),
            [list(row) for row in segment.saved_by_kind],
            [_saved_row(tensor) for tensor in segment.saved_tensors],
            [[list(spec.shape), spec.dtype, spec.batch_dim, spec.requires_grad] for spec in segment.outputs],
        ]
        segments.append(
            [
                bodies.number(repr(body), body),
                segment.name,
                segment.tags,
                segment.parameters,
                segment.inputs,
                [dim for _, dim in segment.tensor_layout],
                segment.tensor_refused,
                segment.shared_gradients,
            ]
        )
    return {
        "format": FORMAT,
        "facts": asdict(model.facts),
        "parameters": [[p.name, p.shape, p.trainable] for p in model.parameters],
        "operations": operations.rows,
        "passes": passes.rows,
        "bodies": bodies.rows,
        "segments": segments,
        "buffer_bytes": model.buffer_bytes,
        "micro_batch": model.micro_batch,
        "seq_len": model.seq_len,
        "dtype": model.dtype,
    }


def from_json(data: dict[str, Any]) -> CapturedModel:
    """Read what `to_json` wrote; raises KeyError, TypeError or ValueError for anything else."""
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']}")
    operations = [_operation(row) for row in data["operations"]]
    passes = [
        PassCost(
            operations=merge_equal(operations[i] for i in row),
            workspace_bytes=workspace,
            workspace_whole_bytes=whole,
        )
        for row, workspace, whole in data["passes"]
    ]
    bodies = [_body(row, passes) for row in data["bodies"]]
    return CapturedModel(
        facts=_facts(data["facts"]),
        parameters=tuple(
            Parameter(name=name, shape=tuple(shape), trainable=trainable)
            for name, shape, trainable in data["parameters"]
        ),
        segments=tuple(
            CapturedSegment(
                name=name,
                tags=tuple((tag, index) for tag, index in tags),
                parameters=tuple(parameters),
                inputs=tuple((source, output) for source, output in inputs),
                tensor_layout=tuple(zip(parameters, layout, strict=False)),
                tensor_refused=tuple(refused),
                shared_gradients=tuple(shared),
                **bodies[body],
            )
            for body, name, tags, parameters, inputs, layout, refused, shared in data["segments"]
        ),
        buffer_bytes=data["buffer_bytes"],
        micro_batch=data["micro_batch"],
        seq_len=data["seq_len"],
        dtype=data["dtype"],
    )


def _facts(data: dict[str, Any]) -> ModelFacts:
    return ModelFacts(**(data | {"layer_facts": tuple(LayerFacts(**row) for row in data["layer_facts"])}))


def _operation_row(op: Operation) -> list[Any]:
    return [
        op.kind.value,
        op.name,
        list(op.shape),
        op.dtype,
        op.flops,
        op.bytes,
        op.count,
        op.causal,
        op.direction,
        op.tensor_dim,
        op.token_dim,
    ]


def _operation(row: Sequence[Any]) -> Operation:
    kind, name, shape, dtype, flops, moved, count, causal, direction, tensor_dim, token_dim = row
    return Operation(
        kind=OpKind(kind), name=name, shape=tuple(shape), dtype=dtype, flops=flops, bytes=moved,
        count=count, causal=causal, direction=direction, tensor_dim=tensor_dim, token_dim=token_dim,
    )  # fmt: skip


def _body(row: Sequence[Any], passes: Sequence[PassCost]) -> dict[str, Any]:
    *values, by_kind, kept, outputs = row
    names = (*PASSES, *_SIZES, *_FLAGS)
    found = dict(zip(names, values, strict=True))
    return {
        **{name: passes[found[name]] for name in PASSES},
        **{name: found[name] for name in _SIZES},
        **{name: tuple(found[name]) for name in _FLAGS},
        "saved_by_kind": tuple((kind, size, late) for kind, size, late in by_kind),
        "saved_tensors": tuple(_saved_tensor(row) for row in kept),
        "outputs": tuple(
            TensorSpec(shape=tuple(shape), dtype=dtype, batch_dim=batch_dim, requires_grad=requires_grad)
            for shape, dtype, batch_dim, requires_grad in outputs
        ),
    }


def _saved_row(tensor: SavedTensor) -> list[Any]:
    return [
        tensor.saved_by,
        tensor.made_by,
        list(tensor.shape),
        tensor.dtype,
        tensor.bytes,
        tensor.border,
        tensor.for_weights,
    ]


def _saved_tensor(row: Sequence[Any]) -> SavedTensor:
    saved_by, made_by, shape, dtype, size, border, for_weights = row
    return SavedTensor(
        saved_by=saved_by, made_by=made_by, shape=tuple(shape), dtype=dtype, bytes=size,
        border=border, for_weights=for_weights,
    )  # fmt: skip

"""From recordings of a module to a `CapturedModel`.

Three recordings: with gradients (forward and backward), without (what a recompute throws away), and with
gradients at one sequence more per microbatch, which shows the microbatch dimension of every boundary tensor
and the dimension of every kernel that is proportional to the tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from cost_models.ops import Operation, OpKind, merge_equal
from piper.capture.dtypes import name_of
from piper.capture.peak import Moment, peak_of
from piper.capture.records import (
    PassRecord,
    Record,
    ReplayMismatchError,
    ReplayRecord,
    SegmentRecord,
    Value,
    kept_inputs,
    kept_outputs,
    rest_of_inputs,
    saved_inside,
)
from piper.capture.regions import Regions, region_of
from piper.capture.run import Run
from piper.capture.split import SplitBackward, split_backward
from piper.capture.tokens import mark_token_dims
from piper.errors import ModelError
from piper.graph.captured import CapturedModel, CapturedSegment, PassCost, SavedTensor
from simulator.plan import ModelFacts, Parameter, TensorSpec

_BIASES = {"aten.mm.default": 0, "aten.addmm.default": 1}
"""Operators of a linear layer, with the biases that each output has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassDetail:
    """What a `PassCost` sums up: its kernels one by one, and the moments of its peak (`peak_of`)."""

    operations: tuple[Operation, ...]
    moments: tuple[Moment, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assembly:
    """A captured model, and the details of its passes by `id` of their `PassCost`."""

    model: CapturedModel
    details: Mapping[int, PassDetail]


def assemble(
    module: nn.Module,
    *,
    runs: tuple[Run, Run, Run],
    facts: ModelFacts | None,
    sizes: tuple[int, int, str],
    other: int,
) -> Assembly:
    """Return the captured model with the details of its passes.

    Args:
        module: on the meta device.
        runs: with gradients, without, and with them at another microbatch.
        facts: counts for reports, or None to count what can be counted.
        sizes: micro_batch, seq_len, dtype.
        other: micro_batch of the third run.
    """
    trained, thrown_away, _ = runs
    micro_batch, seq_len, dtype = sizes
    where = trained.recorder.where
    outputs = [run.outputs for run in runs]
    _require_same_segments(trained, runs[1:], where=where)
    mark_token_dims(runs, sizes=(micro_batch, other))
    costs = Costs(where=where)
    names = segment_names(trained.recorder.segments)
    number = {value: i for values in outputs[0] for i, value in enumerate(values)}
    segments = tuple(
        CapturedSegment(
            name=names[i],
            tags=trained.tags[i],
            parameters=tuple(record.parameters),
            inputs=tuple(
                (value.producer, value.order if value.producer < 0 else number[value])
                for value in record.inputs
            ),
            outputs=tuple(
                _spec(value, more, sizes=(micro_batch, other), where=f"{where}: {names[i]}")
                for value, more in zip(values, larger_values, strict=True)
            ),
            forward=costs.forward(record, values, run=trained),
            forward_no_grad=costs.forward(thrown_away.recorder.segments[i], outputs[1][i], run=thrown_away),
            **costs.backward(record, values, run=trained),
            **_tensor_layout(record, trained.recorder.regions),
        )
        for i, (record, values, larger_values) in enumerate(
            zip(trained.recorder.segments, outputs[0], outputs[2], strict=True)
        )
    )
    segments = tuple(
        replace(segment, shared_gradients=shared) if shared else segment
        for segment, shared in zip(segments, costs.shared_gradients(trained), strict=True)
    )
    parameters = tuple(
        Parameter(name=name, shape=tuple(parameter.shape), trainable=parameter.requires_grad)
        for name, parameter in module.named_parameters()
    )
    model = CapturedModel(
        facts=facts
        or replace(
            _counted_facts(
                where,
                parameters,
                segments,
                tokens=micro_batch * seq_len,
                routed=trained.recorder.values.assumed_balance,
            ),
            vocabulary=trained.recorder.vocabulary.size,
        ),
        parameters=parameters,
        segments=segments,
        buffer_bytes=sum(buffer.untyped_storage().nbytes() for buffer in module.buffers()),
        micro_batch=micro_batch,
        seq_len=seq_len,
        dtype=dtype,
    )
    return Assembly(model=model, details=costs.details)


class Costs:
    """Costs of segments; equal replays share one object.

    Args:
        where: the model, for messages.

    Attributes:
        details: of every cost, by its `id`.
    """

    def __init__(self, *, where: str) -> None:
        self._where = where
        self.details: dict[int, PassDetail] = {}
        self._of_record: dict[Hashable, dict[str, Any]] = {}
        self._known: dict[tuple[object, ...], PassCost] = {}
        self._splits: dict[int, SplitBackward] = {}
        self._cut_storages: dict[int, frozenset[int]] = {}

    def forward(self, record: Record, outputs: Sequence[Value], *, run: Run) -> PassCost:
        """Return the forward's cost, given which of its tensors are outputs."""
        original, own = _original(record), _own_values(record, outputs)
        kept = (*saved_inside(original, own), *(value.storage for value in own))
        return self._cost(original.forward, kept=kept, alive_before={}, extra=(), cut=self._cut(record, run))

    def backward(self, record: Record, outputs: Sequence[Value], *, run: Run) -> dict[str, Any]:
        """Return what a captured segment says of B, BI and BW, and of what they keep."""
        cut = self._cut(record, run)
        original, own = _original(record), _own_values(record, outputs)
        # Gradients that only a replay sums are those of inputs.
        extra = tuple(record.extra_backward) if isinstance(record, ReplayRecord) else ()
        wanted = tuple((id(mine), value.requires_grad) for mine, value in zip(own, outputs, strict=True))
        key = (id(original), wanted, extra, id(cut))
        if key not in self._of_record:
            gathered = run.recorder.regions.gathered_storages() if cut is not None else {}
            whole = {s: nbytes for s, nbytes in saved_inside(original, own).items() if s in gathered}
            self._of_record[key] = self._backward(original, own, extra=extra, cut=cut) | {
                "output_gradients_for_weights": tuple(
                    value.requires_grad and self._late_gradient(record, mine) is not None
                    for mine, value in zip(own, outputs, strict=True)
                ),
                "saved_whole_bytes": sum(whole.values()),
                "saved_gathers_bytes": sum(nbytes for storage, nbytes in whole.items() if gathered[storage]),
            }
        return self._of_record[key]

    def _backward(
        self,
        original: SegmentRecord,
        own: Sequence[Value],
        *,
        extra: tuple[Operation, ...],
        cut: frozenset[int] | None,
    ) -> dict[str, Any]:
        split = self._split(original)
        kept, saved, late = tuple(original.grads_out), saved_inside(original, own), split.reads
        early = {n for n in original.input_grads.values() if n in split.made and n in late}
        saved_late = {storage: nbytes for storage, nbytes in saved.items() if storage in late}
        rest = rest_of_inputs(original)
        rest_late = sum(nbytes for storage, nbytes in rest.items() if storage in late)
        return {
            "backward": self._cost(original.backward, kept=kept, alive_before=saved, extra=extra, cut=cut),
            "backward_inputs": self._cost(
                split.inputs, kept=(*kept, *split.made), alive_before=saved, extra=extra, cut=cut
            ),
            "backward_weights": self._cost(
                split.weights, kept=(), alive_before=saved_late | split.made, extra=(), cut=cut
            ),
            "saved_bytes": sum(saved.values()) + sum(rest.values()),
            "saved_for_weights_bytes": sum(saved_late.values()) + rest_late,
            "saved_by_kind": _saved_by_kind(original, saved, saved_late),
            "saved_tensors": saved_tensors(original, own, late, where=self._where),
            "gradients_for_weights_bytes": sum(
                size for storage, size in split.made.items() if storage not in early
            ),
            "input_gradients_for_weights": tuple(
                original.input_grads.get(value) in early for value in original.inputs
            ),
            "inputs_saved": kept_inputs(original, original.saved),
            "outputs_saved": kept_outputs(own, original.saved),
            "inputs_saved_for_weights": kept_inputs(original, original.saved.keys() & late),
            "outputs_saved_for_weights": kept_outputs(own, original.saved.keys() & late),
        }

    def shared_gradients(self, run: Run) -> list[tuple[int, ...]]:
        """Return `CapturedSegment.shared_gradients` of all segments."""
        keys = [
            [self._late_gradient(record, value) for value in _own_values(record, outputs)]
            for record, outputs in zip(run.recorder.segments, run.outputs, strict=True)
        ]
        times = Counter(key for row in keys for key in row if key is not None)
        numbers = {key: i for i, key in enumerate(k for k, count in times.items() if count > 1)}
        return [
            tuple(-1 if key is None else numbers.get(key, -1) for key in row)
            if numbers.keys() & {key for key in row if key is not None}
            else ()
            for row in keys
        ]

    def _late_gradient(self, record: Record, output: Value) -> tuple[int, int] | None:
        """Return what identifies the gradient of an output if BW reads it: the recording, and its storage."""
        original = _original(record)
        storage = original.output_grads.get(output)
        if storage is None or storage not in self._split(original).reads:
            return None
        if storage in original.backward.allocated:
            return None  # a sum that the segment makes itself: it is among its gradients for weights
        return (record.block if isinstance(record, ReplayRecord) else -1), storage

    def _split(self, record: SegmentRecord) -> SplitBackward:
        if id(record) not in self._splits:
            self._splits[id(record)] = split_backward(record)
        return self._splits[id(record)]

    def _cut(self, record: Record, run: Run) -> frozenset[int] | None:
        """Return the storages that tensor parallelism cuts around a segment; None outside of regions."""
        if region_of(record.stack) is None:
            return None
        regions = record.regions if isinstance(record, ReplayRecord) else run.recorder.regions
        if id(regions) not in self._cut_storages:
            self._cut_storages[id(regions)] = regions.cut_storages()
        return self._cut_storages[id(regions)]

    def _cost(
        self,
        done: PassRecord,
        *,
        kept: tuple[int, ...],
        alive_before: dict[int, int],
        extra: tuple[Operation, ...],
        cut: frozenset[int] | None,
    ) -> PassCost:
        kept = tuple(dict.fromkeys(kept))
        key = (id(done), kept, tuple(alive_before), extra)
        if key not in self._known:
            moments = done.moments(kept=kept, alive_before=alive_before, cut=cut or ())
            if cut is None:
                moments = tuple((alive, 0) for alive, _ in moments)
            size, whole = peak_of(moments)
            operations = (*done.operations, *extra)
            cost = self._known[key] = PassCost(
                operations=merge_equal(operations), workspace_bytes=size, workspace_whole_bytes=whole
            )
            self.details[id(cost)] = PassDetail(operations=operations, moments=moments)
        return self._known[key]


def saved_tensors(
    record: SegmentRecord, outputs: Sequence[Value], late: Container[int], *, where: str
) -> tuple[SavedTensor, ...]:
    """Return what a segment keeps for backward, in the order of F.

    Args:
        record: of the segment.
        outputs: its outputs, as the record knows them.
        late: storages that BW reads.
        where: the model, for messages.
    """
    borders = {value.storage: "output" for value in outputs if value.covers}
    borders |= {value.storage: "input" for value in record.inputs}
    rest = rest_of_inputs(record)
    maker = {n: step.name for step in record.forward.steps if step.operation for n in step.writes}
    found: list[SavedTensor] = []
    for storage, nbytes in record.saved.items():
        keeper, around = record.keepers[storage], rest.get(storage, 0)
        tensor = SavedTensor(
            saved_by=keeper.steps[0].name,
            made_by=maker.get(storage, ""),
            shape=keeper.shape,
            dtype=name_of(keeper.dtype, where=where),
            bytes=nbytes - around,
            border=borders.get(storage, ""),
            for_weights=storage in late,
        )
        found.append(tensor)
        if around:
            found.append(replace(tensor, shape=(around // keeper.dtype.itemsize,), bytes=around, border=""))
    return tuple(found)


def _saved_by_kind(
    record: SegmentRecord, saved: dict[int, int], saved_late: dict[int, int]
) -> tuple[tuple[str, int, int], ...]:
    """Return saved bytes by the kind of the operation that made them last, and what of them BW reads."""
    maker = {
        storage: step.operation.kind.value
        for step in record.forward.steps
        if step.operation is not None
        for storage in step.writes
    }
    kinds = sorted({maker[storage] for storage in saved if storage in maker})
    return tuple(
        (
            kind,
            sum(size for storage, size in saved.items() if maker.get(storage) == kind),
            sum(size for storage, size in saved_late.items() if maker.get(storage) == kind),
        )
        for kind in kinds
    )


def segment_names(records: Sequence[Record]) -> list[str]:
    """Return a name for each segment: the module that owns its parameters, else its outermost tag."""
    owners = [_owner(record) for record in records]
    times = Counter(owners)
    return [
        owner if owner and times[owner] == 1 else "".join(f"{a.name}{a.index}" for a in record.stack[:1])
        for owner, record in zip(owners, records, strict=True)
    ]


def _owner(record: Record) -> str:
    paths = [name.split(".")[:-1] for name in record.parameters]
    shared = [steps[0] for steps in zip(*paths, strict=False) if len(set(steps)) == 1]
    return ".".join(shared[1:] if shared[:1] == ["model"] else shared)


def _original(record: Record) -> SegmentRecord:
    return record.original if isinstance(record, ReplayRecord) else record


def _own_values(record: Record, outputs: Sequence[Value]) -> list[Value]:
    """Return outputs as the recording knows them that the costs come from."""
    if isinstance(record, ReplayRecord):
        if not record.original_of.keys() >= set(outputs):
            raise ReplayMismatchError
        return [record.original_of[value] for value in outputs]
    return list(outputs)


def _tensor_layout(record: Record, regions: Regions) -> dict[str, Any]:
    """Return what a captured segment says of its parameters inside a region [Note: tensor regions]."""
    if region_of(record.stack) is None:
        return {}
    original_name = dict(zip(record.parameters, _original(record).parameters, strict=True))
    if isinstance(record, ReplayRecord):
        regions = record.regions
    return {
        "tensor_layout": tuple(
            (name, regions.layout.get(original, -1)) for name, original in original_name.items()
        ),
        "tensor_refused": tuple(
            name for name, original in original_name.items() if original in regions.refused
        ),
    }


def _spec(value: Value, larger: Value, *, sizes: tuple[int, int], where: str) -> TensorSpec:
    changed = [dim for dim, (a, b) in enumerate(zip(value.shape, larger.shape, strict=False)) if a != b]
    grows = all(value.shape[dim] * sizes[1] == larger.shape[dim] * sizes[0] for dim in changed)
    if len(value.shape) != len(larger.shape) or len(changed) > 1 or not grows:
        raise ModelError(
            where=where, field="boundary tensor", value=list(value.shape),
            rule=f"becomes {list(larger.shape)} with one sequence more",
            fix="let one dimension of every tensor between scopes grow with the microbatch",
        )  # fmt: skip
    return TensorSpec(
        shape=value.shape,
        dtype=name_of(value.dtype, where=where),
        batch_dim=changed[0] if changed else None,
        requires_grad=value.requires_grad,
    )


def _require_same_segments(run: Run, others: Sequence[Run], *, where: str) -> None:
    for other in others:
        if run.tags != other.tags or list(map(len, run.outputs)) != list(map(len, other.outputs)):
            raise ModelError(
                where=where, field="segments", value=len(run.recorder.segments),
                rule="depend on the microbatch or on whether gradients are taken",
                fix="run the same scopes in every forward pass",
            )  # fmt: skip


def _counted_facts(
    name: str,
    parameters: Sequence[Parameter],
    segments: Sequence[CapturedSegment],
    *,
    tokens: int,
    routed: bool,
) -> ModelFacts:
    """Return what the kernels tell: heads where all attention is alike, and weights that a token passes by.

    `routed`: forward reads which experts were chosen.
    """
    count = sum(parameter.numel for parameter in parameters)
    kernels = [op for segment in segments for op in segment.forward.operations]
    attention = {(op.shape[1], op.shape[-1]) for op in kernels if op.kind is OpKind.ATTENTION}
    heads, head_dim = attention.pop() if len(attention) == 1 else (0, 0)
    idle = sum(op.count * _passed_by(op, tokens=tokens, routed=routed) for op in kernels)
    layers = {dict(segment.tags)["LAYER"] for segment in segments if "LAYER" in dict(segment.tags)}
    return ModelFacts(
        name=name, n_parameters=count, n_active_parameters=count - round(idle), layers=len(layers),
        hidden=0, heads=heads, head_dim=head_dim, vocabulary=0,
    )  # fmt: skip


def _passed_by(op: Operation, *, tokens: int, routed: bool) -> float:
    """Return the weights of a kernel that the mean token does not meet.

    A grouped matmul [groups, rows, n, k] has groups x n x k weights; a token meets those of rows / tokens
    groups. A layer of one expert that a loop runs, [1, rows, n, k], meets rows of the tokens.
    """
    if op.kind is OpKind.GROUPED_MATMUL:
        groups, rows, n, k = op.shape
        return max(0, groups - rows / tokens) * n * k
    if routed and op.name in _BIASES:
        _, rows, n, k = op.shape
        return max(0, 1 - rows / tokens) * n * (k + _BIASES[op.name])
    return 0

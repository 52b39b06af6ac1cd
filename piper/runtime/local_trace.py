"""Trace what one rank of a plan with cut tensors computes: the module with its pieces of parameters.

[Note: local trace]
The module runs once more, with parameters of the shapes that a rank holds; where a tensor enters a segment
on the other side of a border, the module gets one of the shape that it has there. So reshapes and loops find
the sizes that a rank has. Both traces make the same calls; where a call would not mean the same on a part (a
table of which rows are elsewhere, a loss over some of the columns), it is replaced by one of
`piper.runtime.cut_operations`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.annotation import Trace, tracing
from piper.capture.calling import loss_of
from piper.errors import ModelError
from piper.runtime.borders import Borders
from piper.runtime.cut_operations import (
    CutDropout,
    CutEmbedding,
    CutLinear,
    CutLoss,
    CutRange,
    CutRowNumbers,
    CutTable,
    RingAttention,
)
from piper.runtime.local_shapes import turned
from piper.runtime.pieces import local_shapes
from piper.runtime.trace import Call, Ref, Tracer, Tracing, replace_leaves
from simulator.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """What a trace must know of a plan.

    Args:
        plan: whose ranks.
        whole: the trace of the uncut module, for the same microbatch.
        micro_batch: samples of it.
    """

    plan: Plan
    whole: Tracing
    micro_batch: int

    @cached_property
    def borders(self) -> Borders:
        """Return the borders of the plan."""
        return Borders(plan=self.plan)

    def axis_around(self, segment: int, axis: str) -> bool:
        """Return whether a region of an axis is around a segment."""
        regions = self.plan.cuts.regions
        return any(r.axis == axis and r.first <= segment <= r.last for r in regions)

    def token_parts(self, segment: int) -> int:
        """Return over how many ranks the tokens of a segment are cut (before experts exchange them)."""
        parts = self.plan.mesh.size("cp")
        if self._turned_context(segment):
            parts = 1
        if self.plan.cuts.sequence_parallel and not self.axis_around(segment, "tp"):
            parts *= self.plan.mesh.size("tp")
        return parts

    def over_tensor(self, segment: int) -> bool:
        """Return whether the tokens of a segment are cut over tp."""
        return self.plan.cuts.sequence_parallel and not self.axis_around(segment, "tp")

    def _turned_context(self, segment: int) -> bool:
        return any(
            r.axis == "cp" and r.method == "all_to_all" and r.first <= segment <= r.last
            for r in self.plan.cuts.regions
        )


def trace_local(module: nn.Module, inputs: Sequence[Tensor], *, cutting: Cutting, where: str) -> Tracing:
    """Return the calls of one rank; the parameters of `module` are replaced by pieces of the same names.

    Raises: ModelError for a module that makes other calls on its pieces than on the whole.
    """
    _cut_parameters(module, local_shapes(cutting.plan))
    with tracing() as annotations:
        mode = _LocalTracer(module, inputs, annotations=annotations, where=where)
        mode.cutting = cutting
        with mode.random, mode:
            try:
                loss = loss_of(module, *inputs)
            except RuntimeError as error:
                raise ModelError(
                    where=where,
                    field="module",
                    value=str(error).splitlines()[0],
                    rule="fails on the pieces of one rank (of attention, whole heads of keys and values)",
                    fix="take fewer ranks of tp, or ask tensors for their sizes in forward",
                ) from error
    mode.tracing.loss = mode.number(loss)
    return _Replacing(
        cutting=cutting, local=mode.tracing, where=where, region_rows=mode.region_rows
    ).replaced()


def _cut_parameters(module: nn.Module, shapes: dict[str, tuple[int, ...]]) -> None:
    pieces = {
        id(parameter): nn.Parameter(
            torch.empty(shapes[name], dtype=parameter.dtype, device="meta"),
            requires_grad=parameter.requires_grad,
        )
        for name, parameter in module.named_parameters()
    }
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) in pieces:
                part._parameters[name] = pieces[id(parameter)]


class _LocalTracer(Tracer):
    """Gives every segment tensors as they lie on its side of the borders [Note: local trace]."""

    cutting: Cutting

    def __init__(
        self, module: nn.Module, inputs: Sequence[Tensor], *, annotations: Trace, where: str
    ) -> None:
        super().__init__(module, inputs, annotations=annotations, where=where)
        self.region_rows: dict[range, int] = {}
        self._sides: dict[tuple[int, object], Tensor] = {}

    def __torch_function__(  # noqa: PLR0917  torch fixes the signature
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Make the call with the tensors of this side."""
        given = replace_leaves((args, kwargs or {}), self._on_this_side)
        return super().__torch_function__(func, types, given[0], given[1])

    def _on_this_side(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        number = self._known(leaf)
        if number is None or self._is_fixed(leaf):
            return leaf
        known = self.tracing.tensors[number]
        here = self._running_segment()
        if known.kind == "input":
            parts = self.cutting.token_parts(here)
            return leaf if parts == 1 else self._side(number, parts, self._cut_input(known.tensor, parts))
        crossed = self.cutting.borders.path(known.segment, here)
        if not crossed:
            return leaf
        shape = tuple(known.tensor.shape)
        whole = tuple(self.cutting.whole.tensors[number].tensor.shape)
        for border in crossed:
            shape = self._behind(border, shape, whole)
        return leaf if shape == tuple(known.tensor.shape) else self._side(number, shape, shape)

    def _behind(self, border: int, shape: tuple[int, ...], whole: tuple[int, ...]) -> tuple[int, ...]:
        side = self.cutting.borders.all[border]
        if len(whole) == 1 and side.region.axis == "ep" and whole[0] != self.cutting.micro_batch:
            return (whole[0] // side.region.degree,) if side.enters else shape
        if not whole or len(whole) == 1:
            return shape
        plan, size = self.cutting.plan, self.cutting.micro_batch
        found = turned(shape, whole, side, plan=plan, micro_batch=size)
        if side.region.axis == "ep" and side.enters:
            self.region_rows[range(side.region.first, side.region.last + 1)] = found[0]
        return found

    def _cut_input(self, tensor: Tensor, parts: int) -> tuple[int, ...]:
        return (tensor.shape[0], tensor.shape[1] // parts, *tensor.shape[2:])

    def _side(self, number: int, key: object, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor that stands for tensor `number` on another side, in the same order of memory."""
        found = self._sides.get((number, key))
        if found is None:
            known = self.tracing.tensors[number]
            with torch._C.DisableTorchFunction(), torch.enable_grad():
                strides = known.tensor.stride()
                order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
                plain = known.tensor.new_empty([shape[dim] for dim in order])
                plain.requires_grad_(known.requires_grad)
                found = plain.permute([order.index(dim) for dim in range(len(shape))])
                found = found.clone(memory_format=torch.preserve_format) if known.requires_grad else found
            self._sides[number, key] = found
            self._alias(found, number)
        return found

    def _running_segment(self) -> int:
        """Return the segment that the next call belongs to, as the whole trace numbers them."""
        stack, found = self.annotations.here, self.tracing.segments
        if found and (not stack or found[-1][0] == stack):
            return len(found) - 1
        whole = self.cutting.whole.segments
        ahead = (i for i in range(len(found), len(whole)) if whole[i][0] == stack)
        return next(ahead, max(0, len(found) - 1))


class Pair(NamedTuple):
    """One call of both traces, in a segment."""

    segment: int
    whole: Call
    local: Call


@dataclass(frozen=True, kw_only=True)
class _Replacing:
    """Compares the calls of both traces, and replaces those that mean something else on a part."""

    cutting: Cutting
    local: Tracing
    where: str
    region_rows: dict[range, int]

    def replaced(self) -> Tracing:
        """Return the local trace with replaced calls."""
        whole = self.cutting.whole
        if len(whole.segments) != len(self.local.segments):
            raise self._refused("segments", len(self.local.segments))
        segments = []
        for number, (theirs, ours) in enumerate(zip(whole.segments, self.local.segments, strict=True)):
            if len(theirs[1]) != len(ours[1]):
                raise self._refused(f"calls in segment {number}", len(ours[1]))
            calls = [self._call(number, *pair) for pair in zip(theirs[1], ours[1], strict=True)]
            segments.append((ours[0], calls))
        return Tracing(tensors=self.local.tensors, segments=segments, loss=self.local.loss)

    def _call(self, segment: int, whole: Call, local: Call) -> Call:
        if whole.function != local.function or whole.results != local.results:
            raise self._refused(f"call in segment {segment}", _name(local))
        self._check_chunks(whole, local)
        if local.dropout is not None:
            return replace(local, function=self._dropout(segment, whole, local))
        rule = _RULES.get(local.function)
        changed = None if rule is None else rule(self, Pair(segment, whole, local))
        if changed is None:
            self._check_rows(segment, local)
        return local if changed is None else replace(local, function=changed)

    def _check_chunks(self, whole: Call, local: Call) -> None:
        """Raise where features that are cut are split: a rank has not the same part of each piece."""
        if local.function not in _CHUNKS or not isinstance(local.results, tuple):
            return
        number = next(number for number in local.results if number is not None)
        of_whole, of_part = (t[number].tensor for t in (self.cutting.whole.tensors, self.local.tensors))
        given = dict(zip(("input", "size", "dim"), local.args, strict=False)) | dict(local.kwargs)
        dim = int(given.get("dim", 0))
        size = self.cutting.plan.training.seq_len
        if of_whole.shape[dim] != of_part.shape[dim] and of_whole.shape[dim] != size:
            raise ModelError(
                where=self.where,
                field=_name(local),
                value=f"of {list(of_whole.shape)}",
                rule="splits features that tensor parallelism cuts: ranks would have other pieces",
                fix="give each piece (gate, up) a matrix of its own, or run with tp=1",
            )

    def _check_rows(self, segment: int, local: Call) -> None:
        """Raise where code of experts depends on how many rows they get."""
        rows = self.rows(segment)
        numbers: list[int] = []
        replace_leaves(
            (local.args, dict(local.kwargs)),
            lambda leaf: numbers.append(leaf) if isinstance(leaf, int) else None,
        )
        if rows is not None and rows in numbers:
            raise self._refused(f"number of rows in segment {segment}", _name(local))

    def rows(self, segment: int) -> int | None:
        """Return how many rows the trace lets the experts of a segment take, or None: it has none."""
        return next((rows for region, rows in self.region_rows.items() if segment in region), None)

    def _dropout(self, segment: int, whole: Call, local: Call) -> CutDropout:
        operation = local.dropout
        if operation is None:
            raise self._refused("dropout", _name(local))
        size, seq = self.cutting.micro_batch, self.cutting.plan.training.seq_len
        shape, part = (
            tuple(tensors[_number(call.results)].tensor.shape)
            for tensors, call in ((self.cutting.whole.tensors, whole), (self.local.tensors, local))
        )
        of_sample = (shape[0] // size, *shape[1:]) if shape[0] != size else (1, *shape[1:])
        of_part = (part[0] // size, *part[1:]) if shape[0] != size else (1, *part[1:])
        dims = tuple(
            (dim, "tokens" if mine * self.cutting.token_parts(segment) == seq == theirs else "features")
            for dim, (theirs, mine) in enumerate(zip(of_sample, of_part, strict=True))
            if theirs != mine
        )
        return CutDropout(operation=operation, whole=of_sample if dims else None, dims=dims)

    def shape(self, argument: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the whole and the local shape of what a call takes."""
        return (
            tuple(self.cutting.whole.tensors[argument[0].number].tensor.shape),
            tuple(self.local.tensors[argument[1].number].tensor.shape),
        )

    def is_kind(self, argument: Any, kind: str) -> bool:
        """Return whether an argument is a parameter, a buffer, ..."""
        return isinstance(argument, Ref) and self.local.tensors[argument.number].kind == kind

    def _refused(self, what: str, value: object) -> ModelError:
        return ModelError(
            where=self.where,
            field=what,
            value=value,
            rule="differs from that of the uncut module: its code depends on sizes that the strategy cuts",
            fix="ask tensors for their sizes in forward, or run with tp=1, cp=1, ep=1",
        )


def _embedding(replacing: _Replacing, pair: Pair) -> CutEmbedding | None:
    _, whole, local = pair
    theirs, ours = replacing.shape((whole.args[1], local.args[1]))
    return None if theirs[0] == ours[0] else CutEmbedding()


def _loss(replacing: _Replacing, pair: Pair) -> CutLoss | None:
    _, whole, local = pair
    theirs, ours = replacing.shape((whole.args[0], local.args[0]))
    if theirs[-1] == ours[-1]:
        return None
    given = dict(zip(_LOSS_OPTIONS, local.args[2:], strict=False)) | dict(local.kwargs)
    unusual = given.get("weight") is not None or given.get("label_smoothing", 0.0) != 0.0
    if given.get("reduction") != "sum" or unusual:
        raise replacing._refused("cross_entropy", dict(local.kwargs))
    return CutLoss(ignored=given.get("ignore_index", -100))


def _linear(replacing: _Replacing, pair: Pair) -> CutLinear | None:
    _, whole, local = pair
    biases = [argument for argument in (*local.args[2:3], local.kwargs.get("bias")) if argument is not None]
    if not biases or not isinstance(local.args[1], Ref):
        return None
    theirs, ours = replacing.shape((whole.args[1], local.args[1]))
    return CutLinear() if theirs[1] != ours[1] else None


def _getitem(replacing: _Replacing, pair: Pair) -> CutTable | None:
    """Replace `table[:seq]` where a rank has other tokens than the first ones."""
    segment, whole, local = pair
    fixed = replacing.is_kind(local.args[0], "buffer") or replacing.is_kind(local.args[0], "parameter")
    if replacing.cutting.token_parts(segment) == 1 or not fixed:
        return None
    first = whole.args[1][0] if isinstance(whole.args[1], tuple) else whole.args[1]
    up_to = slice(None, replacing.cutting.plan.training.seq_len, None)
    return CutTable() if isinstance(first, slice) and first == up_to else None


def _attention(replacing: _Replacing, pair: Pair) -> RingAttention | None:
    segment, _, local = pair
    regions = replacing.cutting.plan.cuts.regions
    given = dict(zip(_ATTENTION_OPTIONS, local.args[3:], strict=False)) | dict(local.kwargs)
    _check_mask(replacing, segment, (local.args[0], given.get("attn_mask")))
    if not any(r.method == "ring" and r.first == segment for r in regions):
        return None
    if given.get("attn_mask") is not None:
        raise ModelError(
            where=replacing.where,
            field="attn_mask",
            value=f"of segment {segment}",
            rule="cannot go round with keys and values",
            fix='use "method": "all_to_all" in shard_sequence, or run with cp=1',
        )
    return RingAttention(causal=bool(given.get("is_causal", False)), scale=given.get("scale"))


def _check_mask(replacing: _Replacing, segment: int, given: tuple[Any, Any]) -> None:
    """Raise where a mask has a part for every head, but a rank has some heads only."""
    query, mask = (
        tuple(replacing.local.tensors[ref.number].tensor.shape) if isinstance(ref, Ref) else ()
        for ref in given
    )
    of_heads = len(mask) > _HEADS_OF_MASK and mask[_HEADS_OF_MASK] > 1
    # Around attention [microbatch, heads, seq, head_dim].
    if of_heads and mask[_HEADS_OF_MASK] != query[1]:
        raise ModelError(
            where=replacing.where,
            field="attn_mask",
            value=f"{list(mask)} in segment {segment}",
            rule=f"has a part for every head, and a rank has {query[1]} heads",
            fix="use a model without linear biases, or run with tp=1 (cp: the method ring)",
        )


def _arange(replacing: _Replacing, pair: Pair) -> CutRange | CutRowNumbers | None:
    segment, whole, local = pair
    seq = replacing.cutting.plan.training.seq_len
    if local.args and local.args[0] == replacing.rows(segment):
        return CutRowNumbers()
    if replacing.cutting.token_parts(segment) == 1 or whole.args != (seq,) or local.args == (seq,):
        return None
    return CutRange()


_LOSS_OPTIONS = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")

_HEADS_OF_MASK = 1
_ATTENTION_OPTIONS = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")

_CHUNKS = (torch.chunk, Tensor.chunk, torch.split, Tensor.split)

_RULES: dict[Callable[..., Any], Callable[[_Replacing, Pair], Any]] = {
    F.embedding: _embedding,
    F.cross_entropy: _loss,
    F.linear: _linear,
    Tensor.__getitem__: _getitem,
    torch.arange: _arange,
    F.scaled_dot_product_attention: _attention,
}


def _number(results: int | tuple[int | None, ...] | None) -> int:
    return results if isinstance(results, int) else next(n for n in results or () if n is not None)


def _name(call: Call) -> str:
    return getattr(call.function, "__name__", str(call.function))

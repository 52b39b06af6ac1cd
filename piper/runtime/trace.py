"""Trace an annotated module on meta tensors into segments: the calls it makes, cut where annotations change.

[Note: tracing calls]
A `TorchFunctionMode` sees every call of the torch API that `forward` makes, outermost first, and running a
segment makes the same calls again: bit for bit what the module computes, at a tenth of the time that
`torch.export` takes. A tensor is known by storage, offset, shape and strides, as in capture, so that both
name the same boundary tensors. What a mode does not see (a custom `autograd.Function`, a tensor kept in an
attribute) leaves a tensor that no call made, and is refused.

[Note: views of parameters]
A view of a parameter or buffer is made again in every segment that uses it: it needs no transfer.

[Note: own views]
A segment may make a view that looks exactly like one that an earlier segment made (`mask.unsqueeze(-1)` in
every layer). Inside the segment that view is its own; to others it is the earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from piper.annotation import Stack, Trace, tracing
from piper.capture.calling import loss_of
from piper.capture.constants import READS, KnownValues
from piper.capture.run import UnannotatedError
from piper.capture.shapes import result_of
from piper.errors import ModelError
from piper.runtime.dropout import dropout_call


@dataclass(frozen=True, slots=True)
class Ref:
    """A traced tensor, by number."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the torch API.

    Args:
        function: what was called.
        args, kwargs: arguments, with `Ref` in place of tensors.
        results: numbers of the tensors that it returned (None where it returned something else); one
            number for a single tensor, a tuple for a sequence.
        written: (number before, number after) of tensors changed in place.
        grad: whether gradients were enabled.
        dropout: number of the dropout operation, or None.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: int | tuple[int | None, ...] | None
    written: tuple[tuple[int, int], ...]
    grad: bool
    dropout: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTensor:
    """What is known of a traced tensor.

    Args:
        segment: that made it; -1: a model input, parameter or buffer.
        tensor: the meta tensor itself.
        requires_grad: when it was made; the tensor itself may change in place later.
        name: of a parameter or buffer, else "".
        kind: "made", "input", "parameter" or "buffer".
    """

    segment: int
    tensor: Tensor
    requires_grad: bool
    kind: str
    name: str = ""


@dataclass(slots=True, kw_only=True)
class Tracing:
    """A finished trace.

    Args:
        tensors: by number; model inputs come first.
        segments: (stack, calls) in order.
        loss: number of what forward returned.
    """

    tensors: list[TracedTensor] = field(default_factory=list)
    segments: list[tuple[Stack, list[Call]]] = field(default_factory=list)
    loss: int = -1


def trace_module(module: nn.Module, inputs: Sequence[Tensor], *, where: str) -> Tracing:
    """Run `module` on meta tensors and return its calls; raises ModelError for what cannot be repeated."""
    with tracing() as annotations:
        mode = Tracer(module, inputs, annotations=annotations, where=where)
        with mode.random, mode:
            loss = loss_of(module, *inputs)
    mode.tracing.loss = mode.number(loss)
    return mode.tracing


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested lists, tuples, dicts and slices."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))


def replace_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Rebuild nested lists, tuples, dicts and slices with every leaf changed."""
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        changed = [replace_leaves(item, change) for item in value]
        return changed if isinstance(value, list) else tuple(changed)
    if isinstance(value, dict):
        return {key: replace_leaves(item, change) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(replace_leaves(item, change) for item in (value.start, value.stop, value.step)))
    return change(value)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return a meta tensor like the result of attention: [..., heads, seq_q, value head_dim]."""
    leaf = query.new_empty((*query.shape[:-1], value.shape[-1]))
    leaf.requires_grad_(any(tensor.requires_grad for tensor in (query, key, value)))
    return leaf * 1.0


def _rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return a meta tensor like the result of an RMS norm."""
    return x * 1.0 if weight is None else x * weight


def _grouped_mm(mat_a: Tensor, mat_b: Tensor, *, offs: Tensor, **_: Any) -> Tensor:
    """Return a meta tensor like the result of a grouped product [rows, k] x [groups, k, n]."""
    return mat_a @ mat_b[0]


STAND_INS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    torch.nn.functional.scaled_dot_product_attention: _attention,
    torch.nn.functional.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    torch._grouped_mm: _grouped_mm,
}
"""While tracing only shapes matter: on meta tensors these fall apart into dozens of slow operators, and
torch would import its compiler for them (seconds)."""


class _RandomWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operators that draw random numbers, and knows values [Note: known values]."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler (seconds) to switch it off for this mode."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = ""
        self._values = KnownValues()

    def __torch_dispatch__(  # noqa: PLR0917  torch fixes the signature
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator."""
        # Fused attention is tagged whether it drops or not; its dropout is looked at apart.
        if torch.Tag.nondeterministic_seeded in func.tags and "scaled_dot_product" not in str(func):
            self.seen = str(func)
        kwargs = kwargs or {}
        if func._opname == READS and (number := self._values.read(args[0])) is not None:
            return number
        result = result_of(func, args, kwargs)
        if result is None:
            result = func(*args, **kwargs)
        self._values.note(func, args, kwargs, result=result)
        return result


class Tracer(TorchFunctionMode):
    """Records calls; see [Note: tracing calls]."""

    def __init__(
        self, module: nn.Module, inputs: Sequence[Tensor], *, annotations: Trace, where: str
    ) -> None:
        super().__init__()
        self.annotations = annotations
        self.where = where
        self.tracing = Tracing()
        self.random = _RandomWatch()
        self._numbers: dict[int, int] = {}
        self._keys: dict[tuple[object, ...], int] = {}
        self._fixed: set[int] = set()
        self._needs_grad: list[bool] = []
        self._alive: list[Tensor] = []  # a dead tensor's id may come again
        self._views: dict[int, Call] = {}
        self._remade: dict[tuple[int, int], int] = {}
        self._own: dict[tuple[int, int], int] = {}
        self._dropouts = 0
        for tensor in inputs:
            self._add(tensor, kind="input")
        for name, tensor in module.named_parameters():
            self._fixed.add(tensor.untyped_storage()._cdata)
            self._add(tensor, kind="parameter", name=name)
        for name, tensor in module.named_buffers():
            self._fixed.add(tensor.untyped_storage()._cdata)
            self._add(tensor, kind="buffer", name=name)

    def __torch_function__(  # noqa: PLR0917  torch fixes the signature
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Make the call, and note it if it made or changed tensors."""
        call = kwargs or {}
        given = list(tensors_in((args, call)))
        versions = [tensor._version for tensor in given]
        self.random.seen = ""
        # Arguments are written down first: afterwards a tensor changed in place has another number.
        noted = (args, call) if not given else replace_leaves((args, call), self._ref)
        function: Callable[..., Any] = STAND_INS.get(func, func)
        result = function(*args, **call)
        written = [t for t, version in zip(given, versions, strict=True) if t._version != version]
        if written or any(True for _ in tensors_in(result)):
            self._note(func, noted, result, written=written)
        return result

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor; raises ModelError for one that no traced call made."""
        found = self._known(tensor)
        if found is None or self._needs_grad[found] != tensor.requires_grad:
            raise ModelError(
                where=self.where,
                field="tensor",
                value=f"{list(tensor.shape)} {tensor.dtype}",
                rule="comes from no call of the torch API (an attribute, or a custom autograd.Function)",
                fix="use register_buffer for constants, and torch functions in forward",
            )
        return found

    def _known(self, tensor: Tensor) -> int | None:
        found = self._numbers.get(id(tensor))
        if found is None:
            found = self._keys.get(_key(tensor))
            if found is not None:
                self._numbers[id(tensor)] = found
                self._alive.append(tensor)
        return found

    def _ref(self, leaf: Any) -> Any:
        return Ref(self._here(self.number(leaf))) if isinstance(leaf, Tensor) else leaf

    def _here(self, number: int) -> int:
        """Return the number to use in the running segment [Note: views of parameters, own views]."""
        if self._own and self._in_segment:
            self._segment()
        number = self._own.get((len(self.tracing.segments) - 1, number), number)
        call = self._views.get(number)
        if call is None or not self._in_segment:
            return number
        calls = self._segment()
        running = len(self.tracing.segments) - 1
        if self.tracing.tensors[number].segment == running:
            return number
        known = self._remade.get((running, number))
        if known is None:
            known = len(self.tracing.tensors)
            self.tracing.tensors.append(replace(self.tracing.tensors[number], segment=running))
            self._needs_grad.append(self._needs_grad[number])
            self._remade[running, number] = known

            def here(leaf: Any) -> Any:
                return Ref(self._here(leaf.number)) if isinstance(leaf, Ref) else leaf

            args, kwargs = replace_leaves((call.args, dict(call.kwargs)), here)
            calls.append(replace(call, args=args, kwargs=kwargs, results=_only(call.results, number, known)))
        return known

    def _note(
        self, func: Callable[..., Any], noted: tuple[Any, Any], result: Any, *, written: Sequence[Tensor]
    ) -> None:
        dropout = dropout_call(func, noted[0], noted[1])
        changed = tuple(self._rewrite(tensor) for tensor in _distinct(written))
        calls = self._segment()
        # A result that shows what another tensor shows already (x.contiguous()) has that tensor's number.
        results = self._results(result)
        self._refuse(func, noted, keyed=dropout is not None)
        call = Call(
            function=func,
            args=noted[0],
            kwargs=noted[1],
            results=results,
            written=changed,
            grad=torch.is_grad_enabled(),
            dropout=None if dropout is None else self._dropouts,
        )
        calls.append(call)
        for number in results if isinstance(results, tuple) else (results,):
            if number is not None and self._is_view_of_fixed(self.tracing.tensors[number]):
                self._views.setdefault(number, call)
        self._dropouts += dropout is not None

    @property
    def _in_segment(self) -> bool:
        return bool(self.annotations.here) or self.annotations.joins

    def _segment(self) -> list[Call]:
        stack, segments = self.annotations.here, self.tracing.segments
        if segments and stack and not segments[-1][0]:
            segments[-1] = (stack, segments[-1][1])  # [Note: outside of scopes]
        elif not segments or (stack and segments[-1][0] != stack):
            if not stack and not self.annotations.joins:
                raise UnannotatedError(
                    where=self.where,
                    field="operation",
                    value="the first one",
                    rule="is outside of every annotation",
                    fix='put all of forward inside `with piper.annotate("PP")` scopes',
                )
            segments.append((stack, []))
        return segments[-1][1]

    def _results(self, result: Any) -> int | tuple[int | None, ...] | None:
        if isinstance(result, list | tuple):
            return tuple(self._result(item) if isinstance(item, Tensor) else None for item in result)
        return self._result(result) if isinstance(result, Tensor) else None

    def _result(self, tensor: Tensor) -> int:
        new_object = id(tensor) not in self._numbers
        found = self._known(tensor)
        if found is None or (self._is_fixed(tensor) and self._made_elsewhere(found)):
            return self._add(tensor, kind="made")
        self._needs_grad[found] = tensor.requires_grad
        return self._own_view(found) if new_object and self._made_elsewhere(found) else found

    def _own_view(self, number: int) -> int:
        """Return the running segment's number of a view that it makes [Note: own views]."""
        running = len(self.tracing.segments) - 1
        if (running, number) not in self._own:
            self._own[running, number] = len(self.tracing.tensors)
            self.tracing.tensors.append(replace(self.tracing.tensors[number], segment=running))
            self._needs_grad.append(self._needs_grad[number])
        return self._own[running, number]

    def _made_elsewhere(self, number: int) -> bool:
        """Return whether another segment made a tensor."""
        return self.tracing.tensors[number].segment not in {-1, len(self.tracing.segments) - 1}

    def _is_fixed(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._fixed

    def _is_view_of_fixed(self, known: TracedTensor) -> bool:
        """Return whether a call made a view; one that returns a parameter itself made none."""
        return known.kind == "made" and self._is_fixed(known.tensor)

    def _rewrite(self, tensor: Tensor) -> tuple[int, int]:
        """Give a tensor that was changed in place a new number; return both."""
        storage = tensor.untyped_storage()._cdata
        if self._is_fixed(tensor):
            raise ModelError(
                where=self.where,
                field="operation",
                value=f"in place on {list(tensor.shape)}",
                rule="changes a parameter or buffer in the forward pass",
                fix="compute a new tensor instead; take layers without running statistics (RMSNorm)",
            )
        for key in [key for key in self._keys if key[0] == storage]:
            del self._keys[key]
        for number, known in enumerate(self.tracing.tensors):
            if known.tensor.untyped_storage()._cdata == storage:
                self._needs_grad[number] = known.tensor.requires_grad
        self._segment()
        return self._here(self._numbers.get(id(tensor), -1)), self._add(tensor, kind="made")

    def _alias(self, tensor: Tensor, number: int) -> None:
        """Let another tensor be known by the same number."""
        self._numbers[id(tensor)] = number
        self._keys[_key(tensor)] = number
        self._alive.append(tensor)

    def _add(self, tensor: Tensor, *, kind: str, name: str = "") -> int:
        number = len(self.tracing.tensors)
        segment = len(self.tracing.segments) - 1 if kind == "made" else -1
        self.tracing.tensors.append(
            TracedTensor(
                segment=segment, tensor=tensor, requires_grad=tensor.requires_grad, kind=kind, name=name
            )
        )
        self._needs_grad.append(tensor.requires_grad)
        self._numbers[id(tensor)] = number
        self._keys[_key(tensor)] = number
        return number

    def _refuse(self, func: Callable[..., Any], noted: tuple[Any, Any], *, keyed: bool) -> None:
        args, kwargs = noted
        attention = func is torch.nn.functional.scaled_dot_product_attention
        drops = attention and dict(enumerate(args)).get(4, kwargs.get("dropout_p", 0.0))
        if (self.random.seen and not keyed) or drops:
            raise ModelError(
                where=self.where,
                field="operation",
                value=getattr(func, "__name__", str(func)),
                rule="draws random numbers in a way that cannot be repeated per sample",
                fix="use torch.nn.Dropout (attention: dropout_p=0)",
            )
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise ModelError(
                where=self.where,
                field="autocast",
                value=getattr(func, "__name__", str(func)),
                rule="must be off in forward",
                fix="choose the compute dtype with --dtype",
            )


def _only(
    results: int | tuple[int | None, ...] | None, number: int, renamed: int
) -> int | tuple[int | None, ...] | None:
    """Return the results of a call that is made again for the sake of one of them."""
    if isinstance(results, tuple):
        return tuple(renamed if result == number else None for result in results)
    return renamed


def _key(tensor: Tensor) -> tuple[object, ...]:
    """Return what identifies a tensor; a detached one shows the same content but takes no gradient."""
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
        tensor.requires_grad,
    )


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())

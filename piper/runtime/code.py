"""From traced calls to one Python function per segment.

[Note: segment code]
A segment becomes straight-line Python that makes the traced calls on its arguments: model inputs and
earlier segments' outputs, parameters, buffers, `Here`. Names are dropped after their last use, so
that a forward without gradients holds no more than the module itself would.

[Note: branches on the device]
The trace runs on meta tensors, so code that asks for the device takes its branch for GPUs. Where torch's CPU
kernels cannot do what that branch asks, `_INSTEAD` has a function that can, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from piper.annotation import tags_of
from piper.runtime.cut_operations import CutDropout, Placed
from piper.runtime.dtypes import NAMES
from piper.runtime.trace import Call, Ref, TracedTensor, Tracing, replace_leaves
from simulator.plan import TensorSpec

Value = tuple[int, int]
"""(segment, output); segment -1 is the model input of that number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCode:
    """A segment as a function of (inputs, parameters, buffers, `Here`), in that order.

    Args:
        run: returns a tuple, one tensor per output.
        tags: tags of its annotation stack.
        inputs: where its inputs come from, in argument order.
        parameters, buffers: names, in argument order.
        outputs: shapes and dtypes.
        keyed: whether the last argument is `Here`.
        source: the generated Python, for people.
    """

    run: Callable[..., tuple[Tensor, ...]]
    tags: tuple[tuple[str, int], ...]
    inputs: tuple[Value, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    outputs: tuple[TensorSpec, ...]
    keyed: bool
    source: str


def segment_codes(tracing: Tracing, *, device: torch.device) -> tuple[SegmentCode, ...]:
    """Return the segments of a trace in order, to run on `device`."""
    used = [_numbers_used(calls) for _, calls in tracing.segments]
    used_after: list[set[int]] = [set().union(*used[i + 1 :]) for i in range(len(used))]
    outputs = [
        [
            number
            for number, known in enumerate(tracing.tensors)
            if known.segment == i and (number == tracing.loss or number in used_after[i])
        ]
        for i in range(len(tracing.segments))
    ]
    values = {number: (i, k) for i, numbers in enumerate(outputs) for k, number in enumerate(numbers)}
    inputs = [number for number, known in enumerate(tracing.tensors) if known.kind == "input"]
    values |= {number: (-1, k) for k, number in enumerate(inputs)}
    return tuple(
        _Writer(tensors=tracing.tensors, device=device).write(
            calls, used[i], segment=i, outputs=outputs[i], values=values, tags=tags_of(stack)
        )
        for i, (stack, calls) in enumerate(tracing.segments)
    )


def _numbers_used(calls: list[Call]) -> dict[int, None]:
    """Return the numbers that calls take, in order of first use."""
    found: dict[int, None] = {}

    def see(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            found.setdefault(leaf.number)
        return leaf

    for call in calls:
        replace_leaves((call.args, dict(call.kwargs)), see)
    return found


@dataclass(slots=True, kw_only=True)
class _Writer:
    """Writes one segment; constants and functions become globals of the generated code."""

    tensors: list[TracedTensor]
    device: torch.device
    constants: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    last_use: dict[int, int] = field(default_factory=dict)

    def write(
        self,
        calls: list[Call],
        used: dict[int, None],
        *,
        segment: int,
        outputs: list[int],
        values: dict[int, Value],
        tags: tuple[tuple[str, int], ...],
    ) -> SegmentCode:
        """Return the segment's code."""
        taken = [number for number in used if self.tensors[number].segment != segment]
        by_kind = {
            kind: [number for number in taken if self.tensors[number].kind == kind]
            for kind in ("parameter", "buffer")
        }
        inputs = [number for number in taken if self.tensors[number].kind in {"made", "input"}]
        arguments = [_name(n) for n in (*inputs, *by_kind["parameter"], *by_kind["buffer"])]
        keyed = any(call.dropout is not None or isinstance(call.function, Placed) for call in calls)
        self.last_use = {number: at for at, call in enumerate(calls) for number in _numbers_used([call])}
        self._clone_overwritten(calls, inputs)
        for at, call in enumerate(calls):
            self._call(call)
            self._drop(at, keep=outputs)
        self.lines.append(f"return ({''.join(_name(number) + ', ' for number in outputs)})")
        head = f"def run({', '.join([*arguments, 'here'] if keyed else arguments)}):"
        source = "\n    ".join([head, *self.lines])
        exec(compile(source, f"<segment {dict(tags)}>", "exec"), self.constants)
        return SegmentCode(
            run=self.constants["run"],
            tags=tags,
            inputs=tuple(values[number] for number in inputs),
            parameters=tuple(self.tensors[number].name for number in by_kind["parameter"]),
            buffers=tuple(self.tensors[number].name for number in by_kind["buffer"]),
            outputs=tuple(_spec(self.tensors[number]) for number in outputs),
            keyed=keyed,
            source=source,
        )

    def _clone_overwritten(self, calls: list[Call], inputs: list[int]) -> None:
        """Copy inputs whose memory is written: others may still read them."""
        storages = {
            self.tensors[before].tensor.untyped_storage()._cdata
            for call in calls
            for before, _ in call.written
        }
        for number in inputs:
            if self.tensors[number].tensor.untyped_storage()._cdata in storages:
                self.lines.append(f"{_name(number)} = {_name(number)}.clone()")

    def _call(self, call: Call) -> None:
        args = [self._text(argument) for argument in call.args]
        args += [f"{key}={self._text(value)}" for key, value in call.kwargs.items()]
        function = self._constant(_INSTEAD.get(call.function, call.function))
        if call.dropout is not None and not isinstance(call.function, Placed):
            function = self._constant(CutDropout(operation=call.dropout))
        if call.dropout is not None or isinstance(call.function, Placed):
            args.insert(0, "here")
        line = f"{self._targets(call)} = {function}({', '.join(args)})"
        if not call.grad:
            self.lines += [f"with {self._constant(torch.no_grad)}():", f"    {line}"]
        else:
            self.lines.append(line)
        for before, after in call.written:
            self.lines.append(f"{_name(after)} = {_name(before)}")

    def _targets(self, call: Call) -> str:
        if isinstance(call.results, tuple):
            return "".join(f"{_name(number)}, " for number in call.results) or "_"
        return _name(call.results)

    def _drop(self, at: int, *, keep: list[int]) -> None:
        dead = [number for number, last in self.last_use.items() if last == at and number not in keep]
        if dead:
            self.lines.append(f"del {', '.join(map(_name, dead))}")

    def _text(self, argument: Any) -> str:  # noqa: PLR0911  one line per type
        """Return an argument as Python text."""
        match argument:
            case Ref():
                return _name(argument.number)
            case torch.Size():
                return self._constant(argument)
            case list():
                return f"[{', '.join(map(self._text, argument))}]"
            case tuple():
                return f"({''.join(self._text(item) + ', ' for item in argument)})"
            case slice():
                parts = (argument.start, argument.stop, argument.step)
                return f"slice({', '.join(map(self._text, parts))})"
            case dict():
                return f"{{{', '.join(f'{key!r}: {self._text(value)}' for key, value in argument.items())}}}"
            case None | bool() | int() | str():
                return repr(self.device.type if argument == "meta" else argument)
            case torch.device():
                return self._constant(self.device)
            case _:
                return self._constant(argument)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name


def _histogram(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002  as torch.histc
    """Count with `torch.histc`, which takes whole numbers on GPUs only; fp64 holds all of them."""
    if input.is_cuda or input.is_floating_point():
        return torch.histc(input, *args, **kwargs)
    return torch.histc(input.double(), *args, **kwargs).to(input.dtype)


_INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {torch.histc: _histogram, Tensor.histc: _histogram}
"""[Note: branches on the device]."""


def _name(number: int | None) -> str:
    return "_" if number is None else f"v{number}"


def _spec(known: TracedTensor) -> TensorSpec:
    tensor = known.tensor
    return TensorSpec(shape=tuple(tensor.shape), dtype=NAMES[tensor.dtype], requires_grad=known.requires_grad)

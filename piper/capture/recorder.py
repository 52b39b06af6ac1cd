"""`Recorder`: watches a module run on meta tensors and notes what each segment computes and keeps.

[Note: keepers]
Autograd keeps operands before an operator runs and results after it; both come after the node of the
operator was made. So a tensor that is kept while the next node's number is still what it was when the last
operator ran is a result of that operator, any other one is an operand of the next.

[Note: tags of backward operations]
Autograd numbers its nodes in the order of the forward pass. Where a scope opens or closes we note the next
number; a node that runs in backward belongs to the segment that was running when the node was made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from cost_models.ops import Operation
from piper.annotation import Stack, Trace, tracing
from piper.capture.choice import KernelChoice
from piper.capture.constants import READS, KnownValues
from piper.capture.operations import ALLOCATIONS, MATH_ATTENTION, MATMULS, Call, operation_of
from piper.capture.records import (
    Keeper,
    PassRecord,
    Record,
    ReplayMismatchError,
    ReplayRecord,
    SegmentRecord,
    Step,
    Value,
)
from piper.capture.regions import Kernel, Regions, region_of
from piper.capture.shapes import result_of
from piper.capture.tensors import TensorBook, address_of, layout_key
from piper.capture.vocabulary import Vocabulary
from piper.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    """One operator as it was called; `free`: it launches no kernel; `mutable`: it writes in place."""

    name: str
    op: str
    args: Sequence[Any]
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    free: bool = False
    mutable: bool = False


class Recorder(TorchDispatchMode):
    """Records one run; use `with recorder.recording():`.

    Args:
        where: the model, for messages.
        parameters: storage address -> fully qualified name, of tensors that must not be counted.
        buffers: storage addresses of buffers.
        inputs: tokens and labels.
        kernels: for which kernels.

    Attributes:
        segments: in execution order.
        book: storages and values.
        values: of tensors that are known without numbers.
        vocabulary: how many token numbers the model can take.
        unannotated: operators that ran outside of every scope, in order.
        outside: whether anything at all, views too, ran outside of every scope.
        averaged: storages of scalars that are means, not sums.
        foreign: tensors that nobody made (constants held in attributes).
        rewritten: storage addresses of buffers that forward changes.
        opened: stacks at the opening of each scope, in order.
        backward: set while the backward pass runs.
        paused: set while operators run that are no part of the model.
        grad_segment: segment that takes a gradient made by a replayed block, by storage.
        regions: what tensor parallelism cuts.
    """

    def __init__(
        self,
        *,
        where: str,
        parameters: dict[int, str],
        buffers: frozenset[int],
        inputs: Sequence[Tensor] = (),
        kernels: KernelChoice,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.where = where
        self.kernels = kernels
        self.parameters = parameters
        self.buffers = buffers
        self.segments: list[Record] = []
        self.book = TensorBook(self._gone)
        for order, tensor in enumerate(inputs):
            self.book.produce(tensor, producer=-1, order=order)
        self.vocabulary = Vocabulary(inputs)
        self.unannotated: list[str] = []
        self.outside = False
        self.averaged: set[int] = set()
        self.foreign: list[str] = []
        self.rewritten: set[int] = set()
        self.opened: list[Stack] = []
        self.backward = False
        self.paused = False
        self.trace = Trace()
        self.grad_segment: dict[int, int] = {}
        self.regions = Regions()
        self.values = KnownValues(routing=True)
        self._marks: list[int] = []
        self._mark_segments: list[int | None] = []
        self._pass = PassRecord()
        self._views: dict[Value, dict[int, None]] = {}
        self._grad_maker: dict[int, int] = {}
        self._sums: dict[int, Step] = {}
        self._first_of_backward = 0
        self._unclaimed: list[Keeper] = []
        self._last: tuple[int, Step | None] = (-1, None)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say no: else torch would import torch._dynamo (see [Note: own shape rules])."""
        return False

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record the block, under a fresh trace."""
        with tracing(on_enter=self._scope) as self.trace:
            self.mark()
            with saved_tensors_hooks(self._pack, _unpack), self:
                yield self

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let operators pass unnoticed."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def end(self) -> None:
        """Stop counting: what dies later belongs to no pass."""
        self._pass = PassRecord()

    def begin_backward(self) -> None:
        """Count what runs from now on as backward."""
        self.backward, self._first_of_backward = True, self.book.storages_taken

    def mark(self) -> None:
        """End the current run of operators: what follows may belong to another segment."""
        self._marks.append(torch._C._autograd._get_sequence_nr())
        self._mark_segments.append(None)

    def mark_as(self, segment: int) -> None:
        """Let the nodes made from now on belong to `segment`."""
        self.mark()
        self._mark_segments[-1] = segment

    def kernel(
        self, name: str, *, reads: Sequence[Tensor], writes: Sequence[Tensor], args: Sequence[Any] = ()
    ) -> None:
        """Note a kernel that torch has on the GPU only, or not at all.

        Args:
            name: like "aten._fused_rms_norm.default".
            reads, writes: its tensors.
            args: what its cost rule reads; default: `reads`.
        """
        if not self.paused:
            op = name.split(".")[1]
            self._note(_Event(name=name, op=op, args=args or reads, reads=reads, writes=writes))

    def erase(self, tensor: Tensor) -> None:
        """Forget the operator of the forward that made `tensor`: another kernel does its work too."""
        number = self.book.storage_of(tensor).number
        records = [record for record in self.segments if isinstance(record, SegmentRecord)]
        for record in reversed(records):
            for step in reversed(record.forward.steps):
                if number in step.writes and step.operation is not None:
                    _forget(record, step)
                    return

    def consume(self, tensor: Tensor, record: Record) -> None:
        """Note that a segment uses a tensor."""
        name = self.parameters.get(address_of(tensor))
        if name is not None:
            record.parameters.setdefault(name)
        elif address_of(tensor) not in self.buffers:
            value = self._value_of(tensor)
            if value is not None and value.producer != record.index and not self._made_here(tensor, record):
                self.follow(tensor, value)
                value.requires_grad = value.requires_grad or tensor.requires_grad
                record.inputs.setdefault(value)

    def follow(self, tensor: Tensor, value: Value) -> None:
        """Note, when it comes, the storage of the gradient of a tensor that leaves its segment."""
        record = self.segments[value.producer] if value.producer >= 0 else None
        if value.requires_grad or not tensor.requires_grad or not isinstance(record, SegmentRecord):
            return

        def note(gradient: Tensor) -> None:
            record.output_grads.setdefault(value, self.book.storage_of(gradient).number)
            self.give_gradient(value, gradient)

        tensor.register_hook(note)  # type: ignore[no-untyped-call]

    def give_gradient(self, value: Value, gradient: Tensor) -> None:
        """Note that the gradient of a value is complete; it is its maker's gradient of an input."""
        number = self.book.storage_of(gradient).number
        maker = self.segments[self._grad_maker[number]] if number in self._grad_maker else None
        if isinstance(maker, SegmentRecord) and value in maker.inputs:
            maker.input_grads.setdefault(value, number)

    def keep_parameter_gradient(self, number: int) -> None:
        """Note that a storage is the gradient of a parameter, or a part of it."""
        maker = self.segments[self._grad_maker[number]] if number in self._grad_maker else None
        if isinstance(maker, SegmentRecord):
            maker.parameter_grads.add(number)

    def pass_gradient(self, tensor: Tensor, segment: int | None) -> None:
        """Note that `segment` (None: whoever called) takes a gradient that a later segment may have made."""
        number = self.book.storage_of(tensor).number
        maker = self._grad_maker.get(number)
        if maker is not None and maker != segment:
            record = self.segments[maker]
            if isinstance(record, SegmentRecord):
                record.grads_out.setdefault(number)

    @property
    def num_operators(self) -> int:
        """Return how many operators the segments hold, replayed ones left out."""
        records = [record for record in self.segments if isinstance(record, SegmentRecord)]
        return sum(len(record.forward.steps) + len(record.backward.steps) for record in records)

    def users_of_parameters(self) -> Counter[str]:
        """Return how many segments use each parameter."""
        return Counter(name for record in self.segments for name in record.parameters)

    @property
    def takes_unfused_attention(self) -> bool:
        """Return whether attention may fall apart into its operators."""
        return self.kernels.attention == "math" or self.kernels.device == "cpu"

    def drop_sums(self, grad: Tensor) -> None:
        """Forget the additions that summed a parameter's gradient over segments: accumulation does that."""
        pending = [self.book.storage_of(grad).number]
        while pending:
            number = pending.pop()
            maker = self.segments[self._grad_maker[number]] if number in self._grad_maker else None
            if isinstance(maker, SegmentRecord):
                maker.grads_out.pop(number, None)
            if isinstance(maker, SegmentRecord) and number in self._sums:
                step = self._sums.pop(number)
                maker.backward.steps.remove(step)
                maker.backward.forget(number)
                for source in step.reads:
                    maker.backward.keep(source)
                pending.extend(step.reads)
            else:
                self.keep_parameter_gradient(number)

    def __torch_dispatch__(  # noqa: PLR0917
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run or infer one operator, and note it."""
        # Else every look at a tensor would pass through the mode that puts kernels in place.
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func._opname == READS and (number := self.values.read(args[0])) is not None:
            return number
        result = self.values.shaped(func, args, kwargs)
        if result is None:
            result = result_of(func, args, kwargs, device=self.kernels.device)
        if result is None:
            result = func(*args, **kwargs)
        if not self.paused:
            self.values.note(func, args, kwargs, result=result)
            self._note(self._event(func, args=(*args, *kwargs.values()), result=result))
        return result

    def _event(self, func: Any, *, args: Sequence[Any], result: Any) -> _Event:
        if func._opname == MATH_ATTENTION and not self.takes_unfused_attention:
            raise ModelError(
                where=self.where, field="attention", value=str(func), rule="takes the unfused (math) path",
                fix="call F.scaled_dot_product_attention directly, on query, key and value",
            )  # fmt: skip
        reads, writes = _tensors(args), _tensors((result,))
        sources = {address_of(tensor) for tensor in reads}
        mutable = func._schema.is_mutable
        view = bool(writes) and not mutable and all(address_of(tensor) in sources for tensor in writes)
        return _Event(
            name=str(func),
            op=func._opname,
            args=args,
            reads=reads,
            writes=writes,
            free=view or func._opname in ALLOCATIONS or torch.Tag.inplace_view in func.tags,
            mutable=mutable,
        )

    def _note(self, event: _Event) -> None:
        if (self.backward and torch._C._current_autograd_node() is None) or _makes_nothing(event):
            return
        segment = self._segment_in_backward(event.reads) if self.backward else self._segment_in_forward()
        if segment is None:
            self.outside = True
            if not event.free:
                self.unannotated.append(event.name)
            elif self.segments and not self.backward:
                segment = len(self.segments) - 1
        else:
            self._pass = _pass_of(self.segments[segment], backward=self.backward)
        self._count_storages(event, segment)
        if self.backward:
            for tensor in event.reads:
                self.pass_gradient(tensor, segment)
                self._receive_kept(tensor, segment)
        else:
            self._link_values(event, segment)
            self.vocabulary.note(event.op, event.args)
            if _averages(event):
                self.averaged.add(self.book.storage_of(event.writes[0]).number)
            self.rewritten.update(_rewritten(event, self.buffers))
        if segment is not None:
            self._add_step(event, segment)

    def _count_storages(self, event: _Event, segment: int | None) -> None:
        for tensor in event.reads:
            self.book.storage_of(tensor)
        for tensor in event.writes:
            if self.book.knows(tensor):
                continue
            storage = self.book.storage_of(tensor)
            self._pass.allocate(storage.number, storage.nbytes)
            if self.backward and segment is not None:
                self._grad_maker[storage.number] = segment

    def _link_values(self, event: _Event, segment: int | None) -> None:
        if segment is None:
            base = self._value_of(event.reads[0]) if event.reads else None
            for tensor in event.writes:
                if base is not None and self.book.value_of(tensor) is None:
                    self.book.produce(tensor, producer=base.producer, order=base.order)
            return
        for tensor in event.reads:
            self.consume(tensor, self.segments[segment])
        for tensor in event.writes:
            if event.mutable:
                self.book.overwrite(tensor, producer=segment)
            elif (known := self.book.value_of(tensor)) is None:
                self.book.produce(tensor, producer=segment)
            elif known.producer != segment:
                self._views.setdefault(known, {})[segment] = None

    def _receive_kept(self, tensor: Tensor, segment: int | None) -> None:
        """Note the first sight of what F made and a segment kept."""
        record = None if segment is None else self.segments[segment]
        address = address_of(tensor)
        fixed = address in self.parameters or address in self.buffers
        if isinstance(record, SegmentRecord) and not fixed:
            storage = self.book.storage_of(tensor)
            number = storage.number
            if number < self._first_of_backward:
                record.saved.setdefault(number, storage.nbytes)  # kept by hand (`ctx.x = x`), or an input
                record.keepers.setdefault(number, _kept_by_hand(tensor))

    def _add_step(self, event: _Event, segment: int) -> None:
        record = self.segments[segment]
        reads, writes = self._numbers(event.reads), self._numbers(event.writes)
        step = Step(name=event.name, operation=None, reads=reads, writes=writes)
        if not self.backward:
            self._claim(step)
        if not event.free:
            step.operation = self._cut(self._operation(event), event, step=step, record=record)
        if isinstance(record, ReplayRecord):
            if step.operation is not None:
                record.extra_backward.append(step.operation)
            return
        (record.backward if self.backward else record.forward).steps.append(step)
        if self.backward and event.op == "add":
            self._sums[step.writes[0]] = step

    def _claim(self, step: Step) -> None:
        """Let the tensors that were kept just before an operator ran be kept by it [Note: keepers]."""
        for keeper in self._unclaimed:
            keeper.steps.append(step)
        self._unclaimed.clear()
        self._last = torch._C._autograd._get_sequence_nr(), step

    def _operation(self, event: _Event) -> Operation:
        return operation_of(
            Call(
                name=event.name,
                op=event.op,
                args=event.args,
                reads=_distinct(event.reads),
                writes=_distinct(event.writes),
                direction=self._direction(event),
                where=self.where,
            )
        )

    def _cut(self, operation: Operation, event: _Event, *, step: Step, record: Record) -> Operation:
        """Return the operation with the dimension that is cut inside a region [Note: tensor regions]."""
        region = region_of(record.stack)
        if region is None or isinstance(record, ReplayRecord):
            return operation
        named = [self.parameters.get(address_of(tensor)) for tensor in event.reads]
        kernel = Kernel(
            kind=operation.kind,
            op=event.op,
            shape=operation.shape,
            operands=event.reads,
            results=event.writes,
            reads=step.reads,
            writes=step.writes,
            parameters=self.regions.parameters(named, step.reads),
            backward=self.backward,
        )
        position = self.regions.position(kernel, region)
        return operation if position < 0 else replace(operation, tensor_dim=position)

    def _numbers(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        return tuple(self.book.storage_of(tensor).number for tensor in tensors)

    def _made_here(self, tensor: Tensor, record: Record) -> bool:
        """Whether the segment made a view that looks like an older tensor (see [Note: crossing tensors])."""
        known = self.book.value_of(tensor)
        return known is not None and record.index in self._views.get(known, {})

    def _value_of(self, tensor: Tensor) -> Value | None:
        value = self.book.value_of(tensor)
        if value is not None:
            return value
        base = self.book.last_written(tensor)
        if base is None:
            self.foreign.append(f"{tensor.dtype} {list(tensor.shape)}")
            return None
        return self.book.produce(
            tensor, producer=base.producer, order=base.order if base.producer < 0 else None
        )

    def _segment_in_forward(self) -> int | None:
        known = self._mark_segments[-1]
        if known is not None:
            return known
        stack = self.trace.here
        if not stack and not self.trace.joins:
            return None
        self._open_segment(stack)
        self._mark_segments[-1] = len(self.segments) - 1
        return self._mark_segments[-1]

    def _open_segment(self, stack: Stack) -> None:
        """Let the last segment be the one of a stack [Note: outside of scopes]."""
        last = self.segments[-1] if self.segments else None
        if last is not None and not stack and isinstance(last, ReplayRecord):
            raise ReplayMismatchError
        if last is not None and stack and (not last.stack or _is_empty(last)):
            last.stack = stack
        elif last is None or (stack and last.stack != stack):
            self.segments.append(SegmentRecord(index=len(self.segments), stack=stack))

    def _segment_in_backward(self, reads: Sequence[Tensor]) -> int | None:
        node: Any = torch._C._current_autograd_node()
        at = bisect_right(self._marks, node._sequence_nr()) - 1
        while at > 0 and self._mark_segments[at] is None:
            at -= 1
        segment = self._mark_segments[at]
        record = None if segment is None else self.segments[segment]
        return self._segment_in_block(record, reads) if isinstance(record, ReplayRecord) else segment

    def _segment_in_block(self, record: ReplayRecord, reads: Sequence[Tensor]) -> int:
        """Return which segment of a replayed block made one of the gradients that are summed here."""
        for tensor in reads:
            taker = self.grad_segment.get(self.book.storage_of(tensor).number, -1)
            found = self.segments[taker]
            if taker >= 0 and isinstance(found, ReplayRecord) and found.block == record.block:
                return taker
        return record.index

    def _direction(self, event: _Event) -> str:
        if not self.backward or torch.is_grad_enabled():  # a checkpointed forward runs again
            return "fwd"
        if event.op == "embedding_dense_backward":
            return "wgrad"
        if event.op not in MATMULS:
            return "bwd"
        if any(address_of(tensor) in self.parameters for tensor in event.reads):
            return "dgrad"
        return "wgrad" if self._takes_parameter(torch._C._current_autograd_node()) else "dgrad"

    def _takes_parameter(self, node: Any, depth: int = 8) -> bool:
        """Whether an operand of the node's forward was a parameter, or a view or cast of one."""
        for source, _ in node.next_functions:
            leaf = getattr(source, "variable", None)
            if leaf is not None and address_of(leaf) in self.parameters:
                return True
            is_view = source is not None and source.name().startswith(_VIEW_NODES)
            if depth and is_view and self._takes_parameter(source, depth - 1):
                return True
        return False

    def _gone(self, number: int, nbytes: int) -> None:
        self._pass.free(number, nbytes)

    def _pack(self, tensor: Tensor) -> Tensor:
        if not (self.paused or self.backward):
            segment = self._segment_in_forward()
            address = address_of(tensor)
            if segment is not None and address not in self.parameters and address not in self.buffers:
                record, storage = self.segments[segment], self.book.storage_of(tensor)
                if isinstance(record, SegmentRecord):
                    record.saved[storage.number] = storage.nbytes
                    self._keep(record, tensor)
        with self.pause():
            return tensor.detach()

    def _keep(self, record: SegmentRecord, tensor: Tensor) -> None:
        keeper = record.keepers.setdefault(
            self.book.storage_of(tensor).number, Keeper(shape=tuple(tensor.shape), dtype=tensor.dtype)
        )
        at, step = self._last
        if step is not None and at == torch._C._autograd._get_sequence_nr():
            keeper.steps.append(step)
        else:
            self._unclaimed.append(keeper)

    @contextmanager
    def _scope(self, stack: Stack) -> Iterator[None]:
        if self.backward:  # a checkpointed forward runs again
            yield
            return
        self.opened.append(stack)
        self.mark()
        try:
            yield
        finally:
            self.mark()


_VIEW_NODES = ("TBackward", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Expand", "ToCopy",
               "Unsqueeze", "Squeeze", "Select", "Slice", "Alias")  # fmt: skip
"""Names of autograd nodes through which a parameter is still the same weights."""


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def _pass_of(record: Record, *, backward: bool) -> PassRecord:
    if isinstance(record, ReplayRecord):
        return PassRecord()
    return record.backward if backward else record.forward


def _makes_nothing(event: _Event) -> bool:
    """Return whether an operator makes only empty tensors, as `torch.utils.checkpoint` does for a mark."""
    return event.free and not event.reads and not any(tensor.numel() for tensor in event.writes)


def _is_empty(record: Record) -> bool:
    """Return whether a segment only began to save a tensor; what runs next may be in a scope inside."""
    return isinstance(record, SegmentRecord) and not record.forward.steps


def _rewritten(event: _Event, buffers: frozenset[int]) -> set[int]:
    """Return the buffers that an operator changes; a batch norm in training keeps running statistics."""
    norm = event.op == "native_batch_norm" and bool(event.args[_TRAINING])
    changed = event.reads if norm else event.writes if event.mutable else ()
    return {address_of(tensor) for tensor in changed} & buffers


_TRAINING = 5
"""Position of `training` among the arguments of a batch norm."""


def _kept_by_hand(tensor: Tensor) -> Keeper:
    """Say that the function whose backward runs keeps a tensor."""
    node: Any = torch._C._current_autograd_node()
    step = Step(name=f"autograd.{node.name()}.default", operation=None, reads=(), writes=())
    return Keeper(shape=tuple(tensor.shape), dtype=tensor.dtype, steps=[step])


def _forget(record: SegmentRecord, step: Step) -> None:
    record.forward.steps.remove(step)
    for number in step.writes:
        record.forward.forget(number)
    for number, keeper in list(record.keepers.items()):
        if step in keeper.steps:
            keeper.steps.remove(step)
            if not keeper.steps:
                del record.keepers[number], record.saved[number]


def _averages(event: _Event) -> bool:
    """Return whether an operator makes one mean of everything; argument 3 of cross-entropy is 1 then."""
    if event.op == "nll_loss_forward":
        return bool(event.args[3] == 1)
    return event.op == "mean" and event.writes[0].dim() == 0


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(_tensors(value))
    return found


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list({(address_of(tensor), *layout_key(tensor)): tensor for tensor in tensors}.values())

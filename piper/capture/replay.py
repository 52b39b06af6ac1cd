"""Blocks that occur many times are recorded once and replayed.

[Note: replay]
Siblings that are alike and take alike inputs compute the same. The first call of such a block is recorded
alone: forward and backward on inputs of the same layout. If its work lies wholly inside scopes that it opens
itself, and it takes no tensors but its arguments, parameters and buffers, that call and all equal ones are
replayed: scopes are opened, segments appended, outputs made up. Else all its calls run as usual.
A module with its index among its attributes is not like its siblings. A block inside a region that is cut
is run, for what enters it may be cut already.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from piper.annotation import Annotation
from piper.capture.backward import Layout, backward_of, empty, layout_of
from piper.capture.kernels import Kernels
from piper.capture.mixing import flash_mixing
from piper.capture.recorder import Recorder
from piper.capture.records import ReplayMismatchError, ReplayRecord, SegmentRecord, Value
from piper.capture.regions import region_of
from piper.capture.repeats import option_of
from piper.capture.tensors import address_of
from piper.tagging import TaggedForward, tagged_forwards


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Template:
    """A block as it was recorded alone.

    Args:
        recorder: its recording.
        segments: its segments.
        parameters: names of the recorded block's parameters, in order.
        inputs: for each input leaf its value; None: no tensor, or a buffer.
        outputs: for each output leaf its value; None: a constant.
        leaves: output leaves, layouts in place of tensors.
        grads: for each input leaf, whether it gets a gradient.
        spec: structure of the output.
    """

    recorder: Recorder
    segments: tuple[SegmentRecord, ...]
    parameters: tuple[str, ...]
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value | None, ...]
    leaves: tuple[Any, ...]
    grads: tuple[bool, ...]
    spec: TreeSpec

    @property
    def tensor_layouts(self) -> list[Layout]:
        """Return the layouts of the outputs that are tensors."""
        return [leaf for leaf, value in zip(self.leaves, self.outputs, strict=True) if value is not None]


@contextmanager
def replaying(blocks: Sequence[tuple[nn.Module, int]], recorder: Recorder) -> Iterator[Replayer]:
    """Replay `blocks` (from `repeated_blocks`) inside the `with`; raises ReplayMismatchError at its end."""
    replayer = Replayer(recorder)
    wrapped = [block for block, signature in blocks if replayer.wrap(block, signature)]
    try:
        yield replayer
    finally:
        for block in wrapped:
            replayer.unwrap(block)
    replayer.check_all_went_backward()


class Replayer:
    """Replays the blocks of one run."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._templates: dict[Hashable, Template | None] = {}
        self._open_calls: dict[int, None] = {}
        self._tagged: dict[int, TaggedForward | None] = {}
        self._num_tagged: dict[int, int] = {}

    def wrap(self, block: nn.Module, signature: int) -> bool:
        """Put our `forward` before the block's own; False when it is not that of its class."""
        original = block.__dict__.get("forward", block.forward)
        if "forward" in block.__dict__ and not isinstance(original, TaggedForward):
            return False

        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = tree_flatten((args, kwargs))
            inside = region_of(self._recorder.trace.stack) is not None
            layout = None if self._recorder.paused or inside else self._layout(leaves)
            if layout is None:
                return original(*args, **kwargs)
            key = (signature, layout, str(spec), torch.is_grad_enabled())
            if key not in self._templates:
                self._templates[key] = self._record(block, original, (leaves, spec))
            template = self._templates[key]
            if template is None:
                return original(*args, **kwargs)
            self._note_calls(block, signature)
            with torch._C.DisableTorchFunction():
                return self._replay(block, template, leaves)

        block.__dict__["forward"] = forward
        self._tagged[id(block)] = original if isinstance(original, TaggedForward) else None
        return True

    def unwrap(self, block: nn.Module) -> None:
        """Take our `forward` away."""
        tagged = self._tagged.pop(id(block))
        if tagged is None:
            del block.__dict__["forward"]
        else:
            block.__dict__["forward"] = tagged

    def _note_calls(self, block: nn.Module, signature: int) -> None:
        """Let the tagged modules of a replayed block count as called; equal blocks have as many."""
        if signature not in self._num_tagged:
            inside = len(list(tagged_forwards(block)))
            self._num_tagged[signature] = inside + (self._tagged[id(block)] is not None)
        if not self._num_tagged[signature]:
            return
        for forward in (self._tagged[id(block)], *(forward for _, forward in tagged_forwards(block))):
            if forward is not None:
                forward.called = True

    def check_all_went_backward(self) -> None:
        """Raise when a replayed block that was recorded with a backward got none."""
        if self._open_calls:
            raise ReplayMismatchError

    def _layout(self, leaves: Sequence[Any]) -> Hashable | None:
        """Return what equal calls have in common; None: do not replay (parameters, shared storage)."""
        parts: list[Hashable] = []
        storages: list[int] = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                parts.append(option_of(leaf))
            elif (address := address_of(leaf)) in self._recorder.buffers:
                parts.append((address, leaf.storage_offset(), *layout_of(leaf)))
            elif address in self._recorder.parameters:
                return None
            else:
                storages.append(address)
                parts.append((leaf.storage_offset(), *layout_of(leaf)))
        return tuple(parts) if len(set(storages)) == len(storages) else None

    def _record(
        self, block: nn.Module, original: Callable[..., Any], inputs: tuple[list[Any], TreeSpec]
    ) -> Template | None:
        outer = self._recorder
        inner = Recorder(
            where=outer.where, parameters=outer.parameters, buffers=outer.buffers, kernels=outer.kernels
        )
        inner.regions.shapes = outer.regions.shapes
        with outer.pause():
            leaves = [self._fresh(leaf) for leaf in inputs[0]]
            args, kwargs = tree_unflatten(leaves, inputs[1])
            with inner.recording(), Kernels(inner), flash_mixing(inner):
                values = tuple(
                    inner.book.produce(leaf, producer=-1, order=order) if self._is_variable(leaf) else None
                    for order, leaf in enumerate(leaves)
                )
                out, spec = tree_flatten(original(*args, **kwargs))
                outputs = tuple(
                    inner.book.value_of(leaf) if isinstance(leaf, Tensor) else None for leaf in out
                )
                if not _is_whole(inner, inputs=values, out=out, outputs=outputs):
                    return None
                grads = _backward(inner, block, leaves=leaves, out=out)
                inner.end()
        outer.rewritten |= inner.rewritten
        outer.values.assumed_balance |= inner.values.assumed_balance
        return Template(
            recorder=inner,
            segments=tuple(record for record in inner.segments if isinstance(record, SegmentRecord)),
            parameters=self._parameters(block),
            inputs=values,
            outputs=outputs,
            leaves=tuple(layout_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in out),
            grads=grads,
            spec=spec,
        )

    def _replay(self, block: nn.Module, template: Template, leaves: Sequence[Any]) -> Any:
        outer = self._recorder
        outside, annotation_of = outer.trace.stack, self._reopen(template)
        rename = dict(zip(template.parameters, self._parameters(block), strict=True))
        base = len(outer.segments)
        if base and not outer.segments[-1].stack:
            raise ReplayMismatchError  # what ran before the first scope belongs to its segment
        replays = [
            ReplayRecord(
                index=base + original.index,
                stack=(*outside, *(annotation_of[annotation.uid] for annotation in original.stack)),
                original=original,
                regions=template.recorder.regions,
                block=base,
                parameters=dict.fromkeys(rename.get(name, name) for name in original.parameters),
            )
            for original in template.segments
        ]
        outer.segments.extend(replays)
        outer.mark_as(base)
        with outer.pause():
            outputs = self._outputs(template, leaves, base=base)
        outer.mark()
        self._wire(template, replays, leaves=leaves, outputs=outputs)
        return tree_unflatten(outputs, template.spec)

    def _reopen(self, template: Template) -> dict[int, Annotation]:
        """Open the block's scopes anew; returns the new annotation for each number of an old one."""
        trace = self._recorder.trace
        outside = trace.stack
        opened: dict[int, Annotation] = {}
        for *parents, scope in template.recorder.opened:
            trace.stack = (*outside, *(opened[parent.uid] for parent in parents))
            opened[scope.uid] = trace.open(scope.name, None if scope.counted else scope.index)
        trace.stack = outside
        return opened

    def _outputs(self, template: Template, leaves: Sequence[Any], *, base: int) -> list[Any]:
        made = iter(self._tensors(template, leaves, base=base))
        return [
            leaf if value is None else next(made)
            for leaf, value in zip(template.leaves, template.outputs, strict=True)
        ]

    def _tensors(self, template: Template, leaves: Sequence[Any], *, base: int) -> Sequence[Tensor]:
        layouts = template.tensor_layouts
        if not any(requires_grad for *_, requires_grad in layouts):
            return [empty(layout) for layout in layouts]
        anchor = torch.empty((), device="meta", requires_grad=True)
        call = _Call(replayer=self, template=template, base=base, leaves=tuple(leaves))
        self._open_calls[base] = None
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        made: tuple[Tensor, ...] = _Replayed.apply(anchor, call, *tensors)  # type: ignore[no-untyped-call]
        return made

    def _wire(
        self,
        template: Template,
        replays: Sequence[ReplayRecord],
        *,
        leaves: Sequence[Any],
        outputs: Sequence[Any],
    ) -> None:
        """Give the segments their inputs, and the tensors that leave the block their values."""
        outer = self._recorder
        first = outer.book.take_orders(template.recorder.book.orders_taken)
        value_of: dict[Value, Value] = {}
        for tensor, original in zip(outputs, template.outputs, strict=True):
            if original is not None:
                replay = replays[original.producer]
                value = outer.book.produce(tensor, producer=replay.index, order=first + original.order)
                value.requires_grad = original.requires_grad
                value_of.setdefault(original, value)
                replay.original_of[value] = original
        position = {value: i for i, value in enumerate(template.inputs) if value is not None}
        for replay in replays:
            for original in replay.original.inputs:
                if original.producer < 0:
                    outer.consume(leaves[position[original]], replay)
                    continue
                source = replays[original.producer]
                if original not in value_of:
                    value = replace(original, producer=source.index, order=first + original.order, storage=-1)
                    value_of[original] = value
                    source.original_of[value] = original
                replay.inputs.setdefault(value_of[original])

    def gradients(self, call: _Call, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return gradients for the tensor inputs of a replayed block, made by nobody."""
        outer, template = self._recorder, call.template
        self._open_calls.pop(call.base, None)
        for grad, (_, stride, _, requires_grad) in zip(grads, template.tensor_layouts, strict=True):
            if requires_grad and (grad is None or grad.stride() != stride):
                raise ReplayMismatchError
            if grad is not None:
                outer.pass_gradient(grad, call.base)
        made: list[Tensor | None] = []
        with outer.pause():
            for leaf, value, has_grad in zip(call.leaves, template.inputs, template.grads, strict=True):
                if not isinstance(leaf, Tensor):
                    continue
                if value is None or not has_grad:
                    made.append(None)
                    continue
                grad = torch.empty_like(leaf)
                user = next(i for i, record in enumerate(template.segments) if value in record.inputs)
                outer.grad_segment[outer.book.storage_of(grad).number] = call.base + user
                made.append(grad)
        return made

    def _is_variable(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and address_of(leaf) not in self._recorder.buffers

    def _parameters(self, block: nn.Module) -> tuple[str, ...]:
        names = self._recorder.parameters
        return tuple(
            names[address_of(parameter)] for _, parameter in block.named_parameters(remove_duplicate=False)
        )

    def _fresh(self, leaf: Any) -> Any:
        if not self._is_variable(leaf):
            return leaf
        last = sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
        flat = torch.empty(leaf.storage_offset() + last + 1, dtype=leaf.dtype, device=leaf.device)
        fresh = flat.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
        return fresh.requires_grad_(leaf.requires_grad)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Call:
    replayer: Replayer
    template: Template
    base: int
    leaves: tuple[Any, ...]


class _Replayed(torch.autograd.Function):
    """Stands in autograd's graph for a replayed block."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        outputs = tuple(empty(layout) for layout in call.template.tensor_layouts)
        ctx.mark_non_differentiable(
            *(
                tensor
                for tensor, (*_, requires_grad) in zip(outputs, call.template.tensor_layouts, strict=True)
                if not requires_grad
            )
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.call.replayer.gradients(ctx.call, grads))


def _is_whole(
    inner: Recorder, *, inputs: Sequence[Value | None], out: Sequence[Any], outputs: Sequence[Value | None]
) -> bool:
    """Whether a recorded block can be replayed: all inside its own scopes, nothing from elsewhere."""
    if inner.outside or inner.foreign or not inner.segments:
        return False
    made_here = all(
        value is not None and value.producer >= 0
        for leaf, value in zip(out, outputs, strict=True)
        if isinstance(leaf, Tensor)
    )
    known = all(
        value.producer >= 0 or value in inputs for record in inner.segments for value in record.inputs
    )
    return made_here and known


def _backward(
    inner: Recorder, block: nn.Module, *, leaves: Sequence[Any], out: Sequence[Any]
) -> tuple[bool, ...]:
    """Run the block's backward; returns for each input leaf whether it got a gradient."""
    roots = [leaf for leaf in out if isinstance(leaf, Tensor) and leaf.requires_grad]
    takes = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    parameters = [parameter for parameter in block.parameters() if parameter.requires_grad]
    if not roots or not (takes or parameters):
        return tuple(False for _ in leaves)
    for leaf in roots:
        value = inner.book.value_of(leaf)
        if value is not None:
            inner.follow(leaf, value)
    got = dict(
        zip(map(id, takes), backward_of(inner, roots, takes=takes, parameters=parameters), strict=True)
    )
    return tuple(got.get(id(leaf), False) for leaf in leaves)

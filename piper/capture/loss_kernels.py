"""Cross-entropy of other frameworks than torch's own over fp32 logits; see `piper.capture.choice`.

The head's product and the cast of its result to fp32 run as usual; when the result meets `F.cross_entropy`,
they are erased as far as the kernel does without them: it takes the logits as the head leaves them ("fused"),
or runs together with the head ("chunked").

[Note: chunks of the loss]
Liger (arXiv 2410.10989, section 3.2) takes so many rows at a time that their logits are about as large as
the hidden features of all rows: vocabulary / hidden chunks, here a power of two. All three products of the
head run in forward; backward only scales the gradients that are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from piper.capture.held import held
from piper.capture.recorder import Recorder
from piper.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """The last product of a linear layer, and its cast (None: none)."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    product: int
    cast_from: Tensor | None = None
    cast: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Call:
    """How the loss is asked for: `reduction` of torch, and whether gradients are wanted."""

    recorder: Recorder
    reduction: str
    grad: bool


class FusedLoss:
    """Remembers the last linear layer and the cast of its result, and replaces `F.cross_entropy`.

    They are remembered only while nothing but views and casts comes between, so that no tensor lives longer
    than it would.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._head: _Head | None = None

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what to call for `function`."""
        name = getattr(function, "__name__", "")
        if function is F.linear:
            return self._linear
        if function is F.cross_entropy:
            return self._cross_entropy
        if name in _CASTS and self._head is not None:
            return lambda *args, **kwargs: self._cast(function, args, kwargs)
        if name not in _BETWEEN_HEAD_AND_LOSS:
            self._head = None
        return function

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self._head = None
        product = F.linear(x, weight, bias)
        self._head = _Head(x=x, weight=weight, bias=bias, product=self._number(product))
        return product

    def _cast(self, function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        made, head = function(*args, **kwargs), self._head
        if head is not None and self._number(args[0]) == head.product != self._number(made):
            self._head = replace(head, cast_from=args[0], cast=self._number(made))
        return made

    def _cross_entropy(  # noqa: PLR0917
        self,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        recorder, head, self._head = self._recorder, self._head, None
        kind = recorder.kernels.cross_entropy
        if kind in {"held", "gathered"}:
            logits = self._kept(logits, head, gathered=kind == "gathered")
            return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)
        call = _Call(recorder=recorder, reduction=reduction, grad=torch.is_grad_enabled())
        number = self._number(logits)
        straight = head is not None and number in {head.product, head.cast}
        if kind == "vocabulary_parallel":
            loss: Tensor = _VocabularyParallel.apply(logits, target, call)  # type: ignore[no-untyped-call]
            return self._noted(loss, reduction)
        if head is not None and straight and head.cast_from is not None:
            recorder.erase(logits)
            logits = head.cast_from.view(logits.shape)
        if kind == "chunked":
            if head is None or not straight or logits.dim() != 2:  # noqa: PLR2004
                raise ModelError(
                    where=recorder.where, field="cross_entropy", value="chunked",
                    rule="needs logits [rows, vocabulary] straight from a linear layer",
                    fix="choose fused, or write F.cross_entropy(F.linear(x, w).float().flatten(0, 1), ...)",
                )  # fmt: skip
            recorder.erase(logits)
            features, bias = head.x.reshape(-1, head.x.shape[-1]), head.bias
            loss = _HeadAndLoss.apply(features, head.weight, bias, target, call)  # type: ignore[no-untyped-call]
        else:
            loss = _Loss.apply(logits, target, call)  # type: ignore[no-untyped-call]
        return self._noted(loss, reduction)

    def _noted(self, loss: Tensor, reduction: str) -> Tensor:
        if reduction == "mean":
            self._recorder.averaged.add(self._number(loss))
        return loss

    def _kept(self, logits: Tensor, head: _Head | None, *, gathered: bool) -> Tensor:
        """Return fp32 logits for torch's own loss, the logits that stay alive besides kept until backward."""
        number = self._number(logits)
        straight = head is not None and number == head.cast and head.cast_from is not None
        product = (
            head.cast_from.view(logits.shape) if head and straight and head.cast_from is not None else logits
        )
        if gathered:
            if product is not logits:
                self._recorder.erase(logits)
            for _ in ("as they arrive", "joined"):
                product = held(_Gathered.apply(product, self._recorder))  # type: ignore[no-untyped-call]
            return held(product.float())
        kept = held(product)
        if product is logits:
            return kept
        self._recorder.erase(logits)
        return kept.float()

    def _number(self, tensor: Tensor) -> int:
        return self._recorder.book.storage_of(tensor).number


class _Loss(torch.autograd.Function):
    """Reads the logits and writes their gradient in place."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, call: _Call) -> Tensor:  # noqa: PLR0917
        loss = _empty_loss(target, call)
        writes = [loss, logits] if call.grad and ctx.needs_input_grad[0] else [loss]
        call.recorder.kernel("fused.cross_entropy.default", reads=[logits, target], writes=writes)
        ctx.recorder = call.recorder
        ctx.save_for_backward(logits)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_logits,) = ctx.saved_tensors
        ctx.recorder.kernel("fused.scale.default", reads=[grad_logits, grads[0]], writes=[grad_logits])
        return grad_logits, None, None


class _Gathered(torch.autograd.Function):
    """The features of all ranks of tp; their gradient is split again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, recorder: Recorder) -> Tensor:
        whole = torch.empty_like(x)
        recorder.kernel("fused.gather_features.default", reads=[x], writes=[whole])
        ctx.recorder = recorder
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        part = torch.empty_like(grads[0])
        ctx.recorder.kernel("fused.split_features.default", reads=[grads[0]], writes=[part])
        return part, None


class _VocabularyParallel(torch.autograd.Function):
    """Maximum, difference, exponentials, their sum and quotient, in place on fp32 logits; so the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, call: _Call) -> Tensor:  # noqa: PLR0917
        loss = _empty_loss(target, call)
        rows = logits.new_empty(target.shape)
        kernel = call.recorder.kernel
        kernel("fused.cross_entropy_max.default", reads=[logits], writes=[rows])
        kernel("fused.cross_entropy_sub.default", reads=[logits, rows], writes=[logits])
        kernel("fused.cross_entropy.default", reads=[logits, target], writes=[loss, logits])
        kernel("fused.cross_entropy_div.default", reads=[logits, rows], writes=[logits])
        ctx.recorder = call.recorder
        ctx.save_for_backward(logits, target)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        softmax, target = ctx.saved_tensors
        ctx.recorder.kernel("fused.scale.default", reads=[softmax, target, grads[0]], writes=[softmax])
        return softmax, None, None


class _HeadAndLoss(torch.autograd.Function):
    """Head and loss some rows at a time, with all gradients [Note: chunks of the loss]."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, call: _Call
    ) -> Tensor:
        recorder, loss = call.recorder, _empty_loss(target, call)
        takes_x, takes_weight, takes_bias = (needed and call.grad for needed in ctx.needs_input_grad[:3])
        grad_x = torch.empty_like(x) if takes_x else None
        grad_weight = torch.empty_like(weight) if takes_weight else None
        grad_bias = torch.empty_like(bias) if takes_bias and bias is not None else None
        count = _chunks(x, weight)
        parts = [(None,) * count if tensor is None else tensor.chunk(count) for tensor in (x, target, grad_x)]
        for rows, labels, grad_rows in zip(*parts, strict=True):
            logits = x.new_empty((rows.shape[0], weight.shape[0]))
            operands = [rows, weight.t()] if bias is None else [bias, rows, weight.t()]
            name = "aten.mm.default" if bias is None else "aten.addmm.default"
            recorder.kernel(name, reads=operands, writes=[logits])
            writes = [loss] if grad_x is grad_weight is None else [loss, logits]
            recorder.kernel("fused.cross_entropy.default", reads=[logits, labels], writes=writes)
            if grad_rows is not None:
                recorder.kernel("aten.mm.default", reads=[logits, weight], writes=[grad_rows])
            if grad_weight is not None:
                recorder.kernel("aten.mm.default", reads=[logits.t(), rows], writes=[grad_weight])
            if grad_bias is not None:
                recorder.kernel("aten.sum.default", reads=[logits], writes=[grad_bias])
        ctx.recorder = recorder
        ctx.save_for_backward(grad_x, grad_weight, grad_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = []
        for kept in ctx.saved_tensors:
            made = None if kept is None else torch.empty_like(kept)
            if made is not None:
                ctx.recorder.kernel("fused.scale.default", reads=[kept, grads[0]], writes=[made])
            scaled.append(made)
        return (*scaled, None, None)


_CASTS = frozenset({"float", "to"})
_BETWEEN_HEAD_AND_LOSS = frozenset(
    {"__get__", "__getitem__", "contiguous", "flatten", "pad", "reshape", "view", "size"}
)
"""Functions between the two: looking at shapes, and laying out logits and labels."""


def _empty_loss(target: Tensor, call: _Call) -> Tensor:
    shape = target.shape if call.reduction == "none" else ()
    return torch.empty(shape, dtype=torch.float32, device=target.device)


def _chunks(x: Tensor, weight: Tensor) -> int:
    """Return the largest power of two of chunks that is at most vocabulary / hidden, and at most the rows."""
    most = min(-(-weight.shape[0] // weight.shape[1]), x.shape[0])
    return 1 << (most.bit_length() - 1)

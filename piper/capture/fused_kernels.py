"""Fused kernels around matmuls: RMS norm, grouped products, rotation, gated activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from piper.capture.recorder import Recorder
from piper.capture.shapes import fits_norm


def rms_norm_with(recorder: Recorder) -> Callable[..., Tensor]:
    """Return what stands for `F.rms_norm`."""

    def rms_norm(  # noqa: PLR0917
        x: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:  # fmt: skip
        if not fits_norm(x, normalized_shape, weight):
            return torch.rms_norm(x, list(normalized_shape), weight, eps)  # says what does not fit
        normed: Tensor = _RMSNorm.apply(x, weight, len(normalized_shape), recorder)  # type: ignore[no-untyped-call]
        return normed

    return rms_norm


class _RMSNorm(torch.autograd.Function):
    """The fused kernel of CUDA: keeps its input and one fp32 number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int, recorder: Recorder) -> Tensor:  # noqa: PLR0917
        rows = x.shape[: x.dim() - dims] + (1,) * dims
        output = x.new_empty(x.shape)
        rstd = x.new_empty(rows, dtype=torch.float32)
        reads = [x] if weight is None else [x, weight]
        recorder.kernel("aten._fused_rms_norm.default", reads=reads, writes=[output, rstd])
        ctx.recorder = recorder
        ctx.save_for_backward(x, rstd, weight)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd, weight = ctx.saved_tensors
        grad_x = x.new_empty(x.shape)
        grad_weight = None if weight is None else torch.empty_like(weight)
        reads = [*grads, x, rstd] if weight is None else [*grads, x, rstd, weight]
        writes = [grad_x] if grad_weight is None else [grad_x, grad_weight]
        ctx.recorder.kernel("aten._fused_rms_norm_backward.default", reads=reads, writes=writes)
        return grad_x, grad_weight, None, None


def grouped_mm_with(recorder: Recorder) -> Callable[..., Tensor]:
    """Return what stands for `torch._grouped_mm`."""

    def grouped_mm(mat_a: Tensor, mat_b: Tensor, *, offs: Tensor, **_: Any) -> Tensor:
        product: Tensor = _GroupedMM.apply(mat_a, mat_b, offs, recorder)  # type: ignore[no-untyped-call]
        return product

    return grouped_mm


class _GroupedMM(torch.autograd.Function):
    """[rows, k] times [groups, k, n] in one kernel: each group its own rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ends: Tensor, recorder: Recorder) -> Tensor:  # noqa: PLR0917
        product = rows.new_empty((rows.shape[0], weights.shape[-1]))
        recorder.kernel("aten._grouped_mm.default", reads=[rows, weights, ends], writes=[product])
        ctx.recorder = recorder
        ctx.save_for_backward(rows, weights, ends)
        return product

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, ends = ctx.saved_tensors
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_rows = rows.new_empty(rows.shape)
            reads = [grads[0], weights.transpose(1, 2), ends]
            ctx.recorder.kernel("aten._grouped_mm.default", reads=reads, writes=[grad_rows])
        if ctx.needs_input_grad[1]:
            grad_weights = torch.empty_like(weights)
            # The gradient is made in the memory order of the weights.
            transposed = weights.stride(1) < weights.stride(2)
            reads = [grads[0].t(), rows, ends] if transposed else [rows.t(), grads[0], ends]
            ctx.recorder.kernel("aten._grouped_mm.default", reads=reads, writes=[grad_weights])
        return grad_rows, grad_weights, None, None


def rotary_with(recorder: Recorder) -> Callable[..., Tensor]:
    """Return what stands for a rotation by tables of cosines and sines."""

    def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
        rotated: Tensor = _Rotary.apply(x, cos, sin, recorder)  # type: ignore[no-untyped-call]
        return rotated

    return rotate


class _Rotary(torch.autograd.Function):
    """Rotation in one kernel each way; keeps the tables only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, recorder: Recorder) -> Tensor:  # noqa: PLR0917
        rotated = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        recorder.kernel("fused.rotary.default", reads=[x, cos, sin], writes=[rotated])
        ctx.recorder = recorder
        ctx.save_for_backward(cos, sin)
        return rotated

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        made = torch.empty(grads[0].shape, dtype=grads[0].dtype, device=grads[0].device)
        ctx.recorder.kernel("fused.rotary_backward.default", reads=[grads[0], cos, sin], writes=[made])
        return made, None, None, None


class FusedGates:
    """Joins `activation(gate) * up` into one kernel that keeps gate and up only.

    The activation runs as usual; when its result meets a product, it is erased and the product does both. The
    gate is remembered only while nothing but the up projection comes between, so that it lives no longer than
    it would. Where both are halves of one projection, the kernel writes the gradient of the whole.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._last: tuple[int, Tensor] | None = None
        self._halves: tuple[Tensor, Tensor, Tensor] | None = None

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what to call for `function`."""
        if function in _ACTIVATIONS:
            return lambda *args, **kwargs: self._activate(function, args, kwargs)
        if function in _PRODUCTS and self._last is not None:
            return lambda a, b: self._multiply(function, a, b)
        if function in _HALVINGS:
            return lambda whole, *args, **kwargs: self._halve(function, whole, *args, **kwargs)
        if getattr(function, "__name__", "") not in _BETWEEN_GATE_AND_UP:
            self._last = self._halves = None
        return function

    def _activate(
        self, function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        self._last = None
        active = function(*args, **kwargs)
        self._last = self._number(active), args[0]
        return active

    def _halve(self, function: Callable[..., Any], whole: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._last = self._halves = None
        parts = function(whole, *args, **kwargs)
        if len(parts) == 2 and parts[0].shape[:-1] == whole.shape[:-1]:  # noqa: PLR2004
            self._halves = whole, parts[0], parts[1]
        return parts

    def _multiply(self, function: Callable[..., Tensor], a: Any, b: Any) -> Tensor:
        number, gate = self._last or (-1, None)
        halves = self._halves
        self._last = self._halves = None
        for active, up in ((a, b), (b, a)):
            if gate is None or not (isinstance(active, Tensor) and isinstance(up, Tensor)):
                continue
            if self._number(active) == number and up.shape == active.shape == gate.shape:
                self._recorder.erase(active)
                whole = halves[0] if halves is not None and halves[1] is gate and halves[2] is up else None
                gated: Tensor = (
                    _Gated.apply(gate, up, self._recorder)  # type: ignore[no-untyped-call]
                    if whole is None
                    else _GatedHalves.apply(whole, self._recorder)  # type: ignore[no-untyped-call]
                )
                return gated
        return function(a, b)

    def _number(self, tensor: Tensor) -> int:
        return self._recorder.book.storage_of(tensor).number


_ACTIVATIONS = frozenset({F.silu, F.gelu, F.relu})
_PRODUCTS = frozenset({torch.mul, Tensor.mul, Tensor.__mul__})
_HALVINGS = frozenset({torch.chunk, Tensor.chunk})
_BETWEEN_GATE_AND_UP = frozenset({"linear", "grouped_mm", "_grouped_mm", "__get__", "t", "transpose", "view"})
"""Functions between the two: the projection, and looking at shapes and weights."""


class _Gated(torch.autograd.Function):
    """activation(gate) * up in one kernel."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, recorder: Recorder) -> Tensor:  # noqa: PLR0917
        gated = gate.new_empty(gate.shape)
        recorder.kernel("fused.gated_activation.default", reads=[gate, up], writes=[gated])
        ctx.recorder = recorder
        ctx.save_for_backward(gate, up)
        return gated

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        made = [gate.new_empty(gate.shape), up.new_empty(up.shape)]
        ctx.recorder.kernel("fused.gated_activation_backward.default", reads=[*grads, gate, up], writes=made)
        return made[0], made[1], None


class _GatedHalves(torch.autograd.Function):
    """activation(first half) * second half in one kernel."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, recorder: Recorder) -> Tensor:
        gated = whole.new_empty((*whole.shape[:-1], whole.shape[-1] // 2))
        recorder.kernel("fused.gated_activation.default", reads=[whole], writes=[gated])
        ctx.recorder = recorder
        ctx.save_for_backward(whole)
        return gated

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (whole,) = ctx.saved_tensors
        made = whole.new_empty(whole.shape)
        reads = [*grads, whole]
        ctx.recorder.kernel("fused.gated_activation_backward.default", reads=reads, writes=[made])
        return made, None

"""Kernels that torch fuses on the GPU, put in place of what it would do on meta tensors.

On meta tensors `F.scaled_dot_product_attention` and `F.rms_norm` fall apart into many operators (attention
would even keep its scores), and `F.grouped_mm` takes bf16 only. Here attention takes the flash path (the
memory-efficient one under a mask), with grouped keys and values as they are; RMS norm and a grouped product
are one kernel each way and operand; dropout keeps a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from piper.capture.recorder import Recorder

aten = torch.ops.aten


_ATTENTION, _DROPOUT = F.scaled_dot_product_attention, F.dropout


class GpuKernels(TorchFunctionMode):
    """Replaces functions of `torch.nn.functional` while a model is captured.

    torch switches a mode off inside the function that it handles, so that it would not see the attention in
    `F.multi_head_attention_forward` (`nn.MultiheadAttention`): there the names themselves are replaced.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._replacements: dict[Callable[..., Any], Callable[..., Any]] = {
            _ATTENTION: _attention,
            F.rms_norm: _rms_norm_with(recorder),
            torch.rms_norm: _rms_norm_with(recorder),
            _DROPOUT: _dropout,
            torch._grouped_mm: _grouped_mm_with(recorder),
        }

    def __enter__(self) -> GpuKernels:
        """Begin."""
        self._before = F.scaled_dot_product_attention, F.dropout
        _name_in_torch(_attention, _dropout)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        """End."""
        super().__exit__(*details)  # type: ignore[no-untyped-call]
        _name_in_torch(*self._before)

    def __torch_function__(  # noqa: PLR0917
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the replacement of `func`, or `func`."""
        replacement = self._replacements.get(func, func)
        return replacement(*args, **(kwargs or {}))


def _name_in_torch(attention: Callable[..., Tensor], dropout: Callable[..., Tensor]) -> None:
    """Let torch's own functions call these."""
    vars(F).update(scaled_dot_product_attention=attention, dropout=dropout)


def _attention(  # noqa: PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:  # fmt: skip
    if query.dim() != 4:  # noqa: PLR2004
        lifted = [tensor.unsqueeze(0) for tensor in (query, key, value)]
        return _attention_of_batch(*lifted, mask=attn_mask, dropout_p=dropout_p, causal=is_causal, **options)[
            0
        ]
    return _attention_of_batch(
        query, key, value, mask=attn_mask, dropout_p=dropout_p, causal=is_causal, **options
    )


def _attention_of_batch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    dropout_p: float,
    causal: bool,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    mixed: Tensor
    if mask is None and query.shape[-1] == value.shape[-1]:
        flash = aten._scaled_dot_product_flash_attention
        mixed, *_ = flash(query, key, value, dropout_p, causal, scale=scale)
        return mixed
    if enable_gqa and query.shape[1] != key.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    bias = None if mask is None else _bias(mask, query, key)
    efficient = aten._scaled_dot_product_efficient_attention
    mixed, *_ = efficient(query, key, value, bias, True, dropout_p, causal, scale=scale)
    return mixed


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: PLR0917
    if not training or not p:
        return x
    dropped: Tensor = aten.native_dropout(x, p, True)[0]
    return x.copy_(dropped) if inplace else dropped


def _rms_norm_with(recorder: Recorder) -> Callable[..., Tensor]:
    def rms_norm(  # noqa: PLR0917
        x: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:  # fmt: skip
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


def _grouped_mm_with(recorder: Recorder) -> Callable[..., Tensor]:
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

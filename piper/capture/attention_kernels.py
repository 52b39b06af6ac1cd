"""Attention by the chosen kernel: flash, torch's unfused path, eager, Megatron's fused softmax, a CPU's own.

Flash takes grouped keys and values as they are; under a mask, or with values of another width, CUDA takes the
memory-efficient kernel. A CPU runs its own flash kernel where torch says that it can (not with dropout), else
the unfused path.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from piper.capture.recorder import Recorder

aten = torch.ops.aten

_FP32_BYTES = 4
"""The softmax of a shorter dtype runs in fp32."""

_FLASH = 1
"""`torch.nn.attention.SDPBackend.FLASH_ATTENTION`, without the import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    mask: Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    grouped: bool


_TORCH_ATTENTION = F.scaled_dot_product_attention
"""torch's own, whatever the name means while a model is captured."""

_Kernel = Callable[..., Tensor]


def attention_with(recorder: Recorder) -> Callable[..., Tensor]:
    """Return what stands for `F.scaled_dot_product_attention`."""
    choice = recorder.kernels
    kernels: dict[str, _Kernel] = {
        "math": _math if choice.device == "cpu" else _math_on_cuda,
        "eager": _eager_with(recorder),
        "fused_softmax": _fused_softmax_with(recorder),
    }
    kernel = kernels.get(choice.attention, _on_cpu_with(recorder) if choice.device == "cpu" else _flash)

    def attention(  # noqa: PLR0917
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        options = _Options(
            mask=attn_mask, dropout=dropout_p, causal=is_causal, scale=scale, grouped=enable_gqa
        )
        if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in (query, key, value))
            raise RuntimeError(f"scaled_dot_product_attention: query, key, value {shapes} do not fit")
        if query.dim() == 4:  # noqa: PLR2004
            return kernel(query, key, value, options=options)
        lifted = [tensor.unsqueeze(0) for tensor in (query, key, value)]
        lone: Tensor = kernel(*lifted, options=options)[0]
        return lone

    return attention


def _flash(query: Tensor, key: Tensor, value: Tensor, *, options: _Options) -> Tensor:
    mixed: Tensor
    if options.mask is None and query.shape[-1] == value.shape[-1]:
        flash = aten._scaled_dot_product_flash_attention
        mixed, *_ = flash(query, key, value, options.dropout, options.causal, scale=options.scale)
        return mixed
    key, value = _repeated(query, key, value, options=options)
    bias = None if options.mask is None else _bias(options.mask, query, key)
    efficient = aten._scaled_dot_product_efficient_attention
    mixed, *_ = efficient(query, key, value, bias, True, options.dropout, options.causal, scale=options.scale)
    return mixed


def _math(query: Tensor, key: Tensor, value: Tensor, *, options: _Options) -> Tensor:
    """Let torch take its unfused path, the only one on meta tensors."""
    return _TORCH_ATTENTION(
        query, key, value, options.mask, options.dropout, options.causal,
        scale=options.scale, enable_gqa=options.grouped,
    )  # fmt: skip


def _math_on_cuda(query: Tensor, key: Tensor, value: Tensor, *, options: _Options) -> Tensor:
    """Take the steps of torch's unfused path (ATen/native/transformers/attention.cpp) with CUDA's dropout."""
    if not options.dropout:
        return _math(query, key, value, options=options)
    dtype = query.dtype
    key, value = _repeated(query, key, value, options=options)
    query, key, value = (t.float() if dtype.itemsize < 4 else t for t in (query, key, value))  # noqa: PLR2004
    factor = math.sqrt(query.shape[-1] ** -0.5 if options.scale is None else abs(options.scale))
    scores = (query * factor) @ (key.transpose(-2, -1) * factor)
    mask = options.mask
    if options.causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores.add_(_additive(mask, scores.dtype) if mask.dtype == torch.bool else mask)
    weights = aten._safe_softmax(scores, -1)
    weights = aten.native_dropout(weights, options.dropout, True)[0]
    mixed: Tensor = (weights @ value).to(dtype)
    return mixed


def _on_cpu_with(recorder: Recorder) -> _Kernel:
    def on_cpu(query: Tensor, key: Tensor, value: Tensor, *, options: _Options) -> Tensor:
        with recorder.pause():
            flash = _cpu_takes_flash(query, key, value, options=options)
        if not flash:
            return _math(query, key, value, options=options)
        bias = options.mask
        if bias is not None and bias.dtype == torch.bool:
            bias = _additive(bias, query.dtype)
        mixed: Tensor
        mixed, _ = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, options.dropout, options.causal, attn_mask=bias, scale=options.scale
        )
        return mixed

    return on_cpu


def _cpu_takes_flash(query: Tensor, key: Tensor, value: Tensor, *, options: _Options) -> bool:
    choose: Any = torch._fused_sdp_choice
    chosen = choose(
        *(_on_one_row(tensor) for tensor in (query, key, value)),
        None if options.mask is None else _on_one_row(options.mask),
        options.dropout,
        options.causal,
        scale=options.scale,
        enable_gqa=options.grouped,
    )
    return bool(chosen == _FLASH)


def _on_one_row(tensor: Tensor) -> Tensor:
    """Return a CPU tensor of the same shape over one row of memory, for torch to choose a kernel by."""
    last = tensor.shape[-1]
    row = torch.empty(last, dtype=tensor.dtype, device="cpu")
    return row.as_strided(tensor.shape, (0,) * (tensor.dim() - 1) + (1,)).requires_grad_(
        tensor.requires_grad and tensor.dtype.is_floating_point
    )


def _eager_with(recorder: Recorder) -> _Kernel:
    def eager(query: Tensor, key: Tensor, value: Tensor, *, options: _Options) -> Tensor:
        key, value = _repeated(query, key, value, options=options)
        scores: Tensor = _Product.apply(query, key.transpose(-2, -1), recorder)  # type: ignore[no-untyped-call]
        scores = scores * (query.shape[-1] ** -0.5 if options.scale is None else options.scale)
        mask = options.mask
        if options.causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None:
            scores = scores + (_additive(mask, scores.dtype) if mask.dtype == torch.bool else mask)
        weights = aten._softmax(scores, -1, scores.dtype.itemsize < _FP32_BYTES).to(query.dtype)
        if options.dropout:
            weights = aten.native_dropout(weights, options.dropout, True)[0]
        mixed: Tensor = _Product.apply(weights, value, recorder)  # type: ignore[no-untyped-call]
        return mixed

    return eager


def _fused_softmax_with(recorder: Recorder) -> _Kernel:
    def fused_softmax(query: Tensor, key: Tensor, value: Tensor, *, options: _Options) -> Tensor:
        key, value = _repeated(query, key, value, options=options)
        scores: Tensor = _Product.apply(query, key.transpose(-2, -1), recorder)  # type: ignore[no-untyped-call]
        weights: Tensor = _MaskedSoftmax.apply(scores, options.mask, recorder)  # type: ignore[no-untyped-call]
        if options.dropout:
            weights = aten.native_dropout(weights, options.dropout, True)[0]
        mixed: Tensor = _Product.apply(weights, value, recorder)  # type: ignore[no-untyped-call]
        return mixed

    return fused_softmax


class _Product(torch.autograd.Function):
    """[batch, heads, m, k] times [batch, heads, k, n] in one batched matmul, operands read where they lie."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, recorder: Recorder) -> Tensor:  # noqa: PLR0917
        product = a.new_empty((*a.shape[:-1], b.shape[-1]))
        recorder.kernel("aten.bmm.default", reads=[a, b], writes=[product])
        ctx.recorder = recorder
        ctx.save_for_backward(a, b)
        return product

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        grad_a, grad_b = torch.empty_like(a), torch.empty_like(b)
        ctx.recorder.kernel("aten.bmm.default", reads=[grads[0], b.transpose(-2, -1)], writes=[grad_a])
        ctx.recorder.kernel("aten.bmm.default", reads=[a.transpose(-2, -1), grads[0]], writes=[grad_b])
        return grad_a, grad_b, None


class _MaskedSoftmax(torch.autograd.Function):
    """Scale, mask and softmax in one kernel, which keeps its result only."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor | None, recorder: Recorder) -> Tensor:  # noqa: PLR0917
        weights = torch.empty_like(scores)
        reads = [scores] if mask is None else [scores, mask]
        recorder.kernel(
            "fused.masked_softmax.default", reads=reads, writes=[weights], args=(scores, scores.dim() - 1)
        )
        ctx.recorder = recorder
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (weights,) = ctx.saved_tensors
        grad = torch.empty_like(weights)
        ctx.recorder.kernel(
            "fused.masked_softmax_backward_data.default",
            reads=[grads[0], weights],
            writes=[grad],
            args=(grads[0], weights, weights.dim() - 1),
        )
        return grad, None, None


def _repeated(query: Tensor, key: Tensor, value: Tensor, *, options: _Options) -> tuple[Tensor, Tensor]:
    if not options.grouped or query.shape[1] == key.shape[1]:
        return key, value
    groups = query.shape[1] // key.shape[1]
    return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        mask = _additive(mask, query.dtype)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)

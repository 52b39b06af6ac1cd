"""Attention with windows, linear biases, capped scores and sinks as flash kernels do it: one kernel each way.

Torch's own flash kernel has none of these, but those that train such models have: FlashAttention 2 windows,
linear biases and softcap (Dao-AILab/flash-attention, `flash_attn_func`), Transformer Engine's and
FlashAttention 3's kernels sinks too. They keep queries, keys, values, result and one fp32 number per row, and
skip scores outside of the window.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from piper.capture.recorder import Recorder
from piper.models.token_mixing import Extras, Mixing, mix, mixing_by


def flash_mixing(recorder: Recorder) -> AbstractContextManager[None]:
    """Let the models of `piper.models` mix tokens by such kernels, if `recorder` records flash on CUDA."""
    choice = recorder.kernels
    if (choice.device, choice.attention) != ("cuda", "flash"):
        return nullcontext()

    def mixer(query: Tensor, key: Tensor, value: Tensor, mixing: Mixing, extras: Extras) -> Tensor:  # noqa: PLR0917
        window = query.shape[2] if mixing.window is None else min(mixing.window, query.shape[2])
        special = mixing.softcap is not None or extras.sinks is not None or extras.slopes is not None
        if not special and window == query.shape[2]:
            return mix(query, key, value, mixing, extras)
        more = tuple(tensor for tensor in (extras.slopes, extras.sinks) if tensor is not None)
        mixed: Tensor = _Flash.apply(recorder, window, query, key, value, *more)  # type: ignore[no-untyped-call]
        return mixed

    return mixing_by(mixer)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, recorder: Recorder, window: int, query: Tensor, key: Tensor, value: Tensor, *more: Tensor
    ) -> Tensor:
        batch, heads, seq, _ = query.shape
        mixed = query.new_empty((batch, seq, heads, value.shape[-1])).transpose(1, 2)
        lse = query.new_empty((batch, heads, seq), dtype=torch.float32)
        reads = [query, key, value, *more]
        recorder.kernel(
            "fused.window_attention.default",
            reads=reads,
            writes=[mixed, lse],
            args=(query, key, value, window),
        )
        ctx.recorder, ctx.window = recorder, window
        ctx.save_for_backward(*reads, mixed, lse)
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *taken, mixed, lse = ctx.saved_tensors
        made = [
            torch.empty_like(tensor) if wanted else None
            for tensor, wanted in zip(taken, ctx.needs_input_grad[2:], strict=True)
        ]
        ctx.recorder.kernel(
            "fused.window_attention_backward.default",
            reads=[*grads, *taken, mixed, lse],
            writes=[tensor for tensor in made if tensor is not None],
            args=(*taken[:3], ctx.window),
        )
        return None, None, *made

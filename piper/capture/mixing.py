"""Attention with windows, linear biases, capped scores and sinks as flash kernels do it: one kernel each way.

Torch's own flash kernel has none of these, but those that train such models have: FlashAttention 2 windows,
linear biases and softcap (Dao-AILab/flash-attention, `flash_attn_func`), Transformer Engine's and
FlashAttention 3's kernels sinks too. They keep queries, keys, values, result and one fp32 number per row, and
skip scores outside of the window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piper.capture.recorder import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """How the tokens of a sequence see each other; always causally.

    Args:
        scale: of the scores; None: head_dim ** -0.5.
        window: a query sees this many last tokens, itself included; None: all.
        softcap: scores become softcap * tanh(scores / softcap); None: not.
        dropout: of the probabilities; 0 outside of training.
        lengths: of the documents in a sequence, which do not see each other; (): it is one.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """Tensors that join the scores.

    Args:
        slopes: of linear biases, [heads], or None.
        sinks: a score per head that joins each softmax, [heads], or None.
    """

    slopes: Tensor | None = None
    sinks: Tensor | None = None


Mixer = Callable[[Tensor, Tensor, Tensor, Mixing, Extras], Tensor | None]
"""(query, key, value, mixing, extras) -> mixed values; None: torch's own way is right."""

_MIXER: ContextVar[Mixer | None] = ContextVar("piper_mixer", default=None)


@contextmanager
def mixing_by(mixer: Mixer) -> Iterator[None]:
    """Let `mixer` mix the tokens of every attention that runs in the block."""
    token = _MIXER.set(mixer)
    try:
        yield
    finally:
        _MIXER.reset(token)


def mixed_by_kernel(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, mixing: Mixing, extras: Extras
) -> Tensor | None:
    """Return what the kernel of the block that runs makes, [microbatch, heads, seq, head_dim], or None."""
    mixer = _MIXER.get()
    return None if mixer is None else mixer(query, key, value, mixing, extras)


def flash_mixing(recorder: Recorder) -> AbstractContextManager[None]:
    """Let the models of `piper.models` mix tokens by such kernels, if `recorder` records flash on CUDA."""
    choice = recorder.kernels
    if (choice.device, choice.attention) != ("cuda", "flash"):
        return nullcontext()

    def mixer(query: Tensor, key: Tensor, value: Tensor, mixing: Mixing, extras: Extras) -> Tensor | None:  # noqa: PLR0917
        window = query.shape[2] if mixing.window is None else min(mixing.window, query.shape[2])
        special = mixing.softcap is not None or extras.sinks is not None or extras.slopes is not None
        if not special and window == query.shape[2]:
            return None
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

"""What a forward must not change, or have changed, while it is recorded; and what to say when it fails.

[Note: eager and whole]
Compiled submodules (`torch.compile`) run as plain Python, so that their operators are seen. Autocast acts on
the device type, which is meta here, so that it would be ignored without a word: it is refused. A buffer that
forward replaces (`self.mean = ...`) is put back after each recording, and stays alive until then.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from piper.errors import ModelError

_ON_DEVICE = "make tensors in forward on the device of the tokens: torch.zeros(..., device=x.device)"

_HINTS = {
    "FlexAttention": "use F.scaled_dot_product_attention, with attn_mask or is_causal",
    "nonzero": "route tokens to experts with F.grouped_mm, whose shapes do not depend on the routing "
    "(transformers: experts_implementation='grouped_mm')",
    "masked_select": "multiply by the mask, or use torch.where with three arguments",
    "unique": "count with torch.bincount(minlength=...) or torch.histc, whose shapes are known",
    "repeat_interleave": "give repeat_interleave a number, or output_size",
    "use_reentrant": "call checkpoint with use_reentrant=False",
    "Expected all tensors to be on the same device": _ON_DEVICE,
    "is not on the expected device meta": _ON_DEVICE,
}
"""Part of a message -> fix, for what users meet most."""


def failed(error: Exception, *, where: str, what: str) -> ModelError:
    """Return the error that tells of an exception in the user's `what` ("forward" or "backward")."""
    text = f"{type(error).__name__}: {error}"
    general = "take (tokens, labels), read no tensor's content, and keep constants in buffers"
    return ModelError(
        where=where, field=what, value=text,
        rule="failed on meta tensors [micro_batch, seq_len] of tokens and labels",
        fix=next((fix for part, fix in _HINTS.items() if part in text), general),
    )  # fmt: skip


@contextmanager
def undisturbed(module: nn.Module, *, where: str) -> Iterator[None]:
    """Record a forward inside the block [Note: eager and whole]."""
    buffers = [(part, dict(part._buffers)) for part in module.modules() if part._buffers]
    try:
        with _eager(), _no_autocast(where):
            yield
    finally:
        for part, before in buffers:
            part._buffers.clear()
            part._buffers.update(before)


def _eager() -> AbstractContextManager[Any]:
    if "torch._dynamo" not in sys.modules:  # nothing can have been compiled
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def _no_autocast(where: str) -> Iterator[None]:
    original = torch.autocast.__init__

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(("device_type", "dtype", "enabled"), args, strict=False)) | kwargs
        if given.get("enabled", True):
            raise ModelError(
                where=where, field="autocast", value=str(given.get("dtype") or given.get("device_type")),
                rule="must be off in forward: what it casts cannot be seen on meta tensors",
                fix="choose the compute dtype with --dtype, and cast in forward where another is needed",
            )  # fmt: skip
        original(self, *args, **kwargs)

    torch.autocast.__init__ = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]

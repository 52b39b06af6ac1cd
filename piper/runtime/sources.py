"""From what names a model (a `ModelSource`, or a factory) to real `nn.Module`s and buffer values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from piper.capture.default_units import tag_repeated_blocks
from piper.capture.run import UnannotatedError, to_meta
from piper.runtime.dtypes import DTYPES
from piper.runtime.trace import trace_module
from piper.tagging import is_tagged

Source = Any
"""A `piper.models.ModelSource`, or a callable without arguments that returns an annotated `nn.Module`."""


def build(source: Source, *, dtype: str, device: str, seq_len: int) -> nn.Module:
    """Build the module on `device` ("meta": shapes only), in training mode, with annotations."""
    module = _built(source, dtype=dtype, device=device, seq_len=seq_len).train()
    if isinstance(source, Callable) or getattr(source, "factory", None):  # type: ignore[arg-type]
        _give_units(module, dtype=DTYPES[dtype], seq_len=seq_len)
    return module


def _built(source: Source, *, dtype: str, device: str, seq_len: int) -> nn.Module:
    if isinstance(source, Callable):  # type: ignore[arg-type]
        before = torch.get_default_dtype()
        torch.set_default_dtype(DTYPES[dtype])
        try:
            with torch.device(device):
                module: nn.Module = source()
        finally:
            torch.set_default_dtype(before)
    else:
        from piper.models import build_module

        module = build_module(source, dtype=dtype, device=device, seq_len=seq_len)
    return module


def _give_units(module: nn.Module, *, dtype: torch.dtype, seq_len: int) -> None:
    """Tag the default units of a module whose forward opens no scope, as capture did."""
    if is_tagged(module):
        return
    tokens, labels = (torch.zeros(1, seq_len, dtype=torch.int64, device="meta") for _ in range(2))
    try:
        trace_module(to_meta(module, dtype=dtype), (tokens, labels), where="runtime")
    except UnannotatedError:
        tag_repeated_blocks(module)


def buffer_values(source: Source, *, dtype: str, seq_len: int) -> dict[str, Tensor]:
    """Return the real values of all buffers, without ever holding real parameters."""
    with _parameters_on_meta():
        module = _built(source, dtype=dtype, device="cpu", seq_len=seq_len)
    return {name: buffer.detach() for name, buffer in module.named_buffers()}


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        original(module, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]

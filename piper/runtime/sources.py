"""From what names a model (a `ModelSource`, or a factory) to real `nn.Module`s and buffer values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from piper.runtime.dtypes import DTYPES

Source = Any
"""A `piper.models.ModelSource`, or a callable without arguments that returns an annotated `nn.Module`."""


def build(source: Source, *, dtype: str, device: str, seq_len: int) -> nn.Module:
    """Build the module on `device` ("meta": shapes only), in training mode."""
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
    return module.train()


def buffer_values(source: Source, *, dtype: str, seq_len: int) -> dict[str, Tensor]:
    """Return the real values of all buffers, without ever holding real parameters."""
    with _parameters_on_meta():
        module = build(source, dtype=dtype, device="cpu", seq_len=seq_len)
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

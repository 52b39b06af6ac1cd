"""From a `ModelSource` to its `nn.Module`."""

from __future__ import annotations

import torch
from torch import nn

from cost_models.errors import require_known
from piper.errors import ModelError
from piper.models import MODELS
from piper.models.shape import DecoderShape
from piper.models.source import ModelSource, load, resolve_factory
from piper.user_code import user_code

TORCH_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def build_module(source: ModelSource, *, dtype: str, device: str, seq_len: int | None) -> nn.Module:
    """Return the annotated module of `source`; see `piper.models.build_module`."""
    require_known(dtype, list(TORCH_DTYPES), where=source.where, field="dtype", error=ModelError)
    if source.shape is None:
        return _from_factory(source, dtype=dtype, device=device)
    _require_positions(source.shape, seq_len, where=source.where)
    with _defaults(dtype=dtype, device=device):
        module: nn.Module = load(MODELS[source.shape.family].module)(source.shape, seq_len=seq_len)
    return module


def _require_positions(shape: DecoderShape, seq_len: int | None, *, where: str) -> None:
    """Raise for a sequence (or a document of it) that is longer than the table of learned positions."""
    table = shape.embedding.positions
    longest = max(shape.segment_lengths or (seq_len or 0,))
    if table is not None and longest > table:
        raise ModelError(
            where=where, field="seq_len", value=longest,
            rule=f"exceeds the {table} positions that the model learns",
            fix=f"take at most {table} tokens (--seq-len {table}), or a config with more positions",
        )  # fmt: skip


def _from_factory(source: ModelSource, *, dtype: str, device: str) -> nn.Module:
    factory = resolve_factory(source.factory or "", where=source.where)
    if isinstance(factory, nn.Module):
        raise ModelError(
            where=source.where, field="factory", value=source.factory,
            rule="is a module, and must be a function that returns one",
            fix=f"write def build(): return {(source.factory or '').rpartition(':')[2]}, and name build",
        )  # fmt: skip
    try:
        with user_code(), torch.device(device):
            module = factory()
    except Exception as error:
        raise ModelError(
            where=source.where, field="factory", value=source.factory,
            rule=f"failed: {type(error).__name__}: {error}",
            fix="call it without arguments in Python, and mend it",
        ) from error  # fmt: skip
    if not isinstance(module, nn.Module):
        raise ModelError(
            where=source.where, field="factory", value=type(module).__name__, rule="is not an nn.Module",
            fix="return a torch.nn.Module",
        )  # fmt: skip
    return module.to(TORCH_DTYPES[dtype])


class _defaults:  # noqa: N801
    """Create tensors with this dtype and on this device inside the `with` block."""

    def __init__(self, *, dtype: str, device: str) -> None:
        self._dtype = TORCH_DTYPES[dtype]
        self._device = torch.device(device)

    def __enter__(self) -> None:
        self._previous = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        self._device.__enter__()

    def __exit__(self, *details: object) -> None:
        self._device.__exit__(*details)
        torch.set_default_dtype(self._previous)

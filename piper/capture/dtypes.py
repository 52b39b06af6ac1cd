"""Names of torch dtypes in the operation vocabulary."""

from __future__ import annotations

import torch

from cost_models.errors import require_known
from piper.errors import ModelError

NAMES: dict[torch.dtype, str] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.uint64: "uint64",
    torch.uint8: "uint8",
    torch.bool: "bool",
}

COMPUTE: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def compute_dtype(name: str, *, where: str) -> torch.dtype:
    """Return the torch dtype in which a model is captured; raises ModelError for others."""
    require_known(name, list(COMPUTE), where=where, field="dtype", error=ModelError)
    return COMPUTE[name]


def name_of(dtype: torch.dtype, *, where: str) -> str:
    """Return the vocabulary's name of a dtype; raises ModelError when it has none."""
    name = NAMES.get(dtype)
    if name is None:
        raise ModelError(
            where=where, field="dtype", value=str(dtype), rule="is not in the operation vocabulary",
            fix=f"use one of {', '.join(NAMES.values())}",
        )  # fmt: skip
    return name

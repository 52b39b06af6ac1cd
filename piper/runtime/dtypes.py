"""Names of dtypes in plans, as torch dtypes."""

from __future__ import annotations

import torch

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "bool": torch.bool,
}

NAMES = {dtype: name for name, dtype in DTYPES.items()}

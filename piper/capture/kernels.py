"""Kernels in place of what torch does on meta tensors: those of the chosen device and framework.

On meta tensors `F.scaled_dot_product_attention` and `F.rms_norm` fall apart into many operators, `F.dropout`
keeps its mask in the compute dtype, and `F.grouped_mm` takes bf16 only. On CUDA attention is one kernel, RMS
norm too, and dropout keeps one byte per element. `KernelChoice` says which; the kernels themselves are in
`attention_kernels`, `fused_kernels` and `loss_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from piper.capture.attention_kernels import attention_with
from piper.capture.fused_kernels import FusedGates, grouped_mm_with, rms_norm_with, rotary_with
from piper.capture.loss_kernels import FusedLoss
from piper.capture.recorder import Recorder
from piper.capture.replaceable import REPLACEABLE

Replacement = Callable[..., Any]


_ATTENTION, _DROPOUT = F.scaled_dot_product_attention, F.dropout


class Kernels(TorchFunctionMode):
    """Replaces functions of torch while `recorder` records a model.

    torch switches a mode off inside the function that it handles, so that it would not see the attention in
    `F.multi_head_attention_forward` (`nn.MultiheadAttention`): there the names themselves are replaced.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        choice = recorder.kernels
        self._replacements: dict[Replacement, Replacement] = {
            _ATTENTION: attention_with(recorder),
            torch._grouped_mm: grouped_mm_with(recorder),
        }
        if choice.device == "cuda":
            self._replacements |= {_DROPOUT: _dropout}
        if choice.device == "cuda" and choice.norm == "fused":
            rms_norm = rms_norm_with(recorder)
            self._replacements |= {F.rms_norm: rms_norm, torch.rms_norm: rms_norm}
        if choice.rotary == "fused" and "rotary" in REPLACEABLE:
            self._replacements[REPLACEABLE["rotary"]] = rotary_with(recorder)
        self._joins: list[FusedGates | FusedLoss] = []
        if choice.activation == "fused":
            self._joins.append(FusedGates(recorder))
        if choice.cross_entropy != "unfused":
            self._joins.append(FusedLoss(recorder))

    def __enter__(self) -> Kernels:
        """Begin."""
        self._before = F.scaled_dot_product_attention, F.dropout
        _name_in_torch(*(self._replacements.get(function, function) for function in (_ATTENTION, _DROPOUT)))
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
        kwargs = kwargs or {}
        if self._recorder.paused:
            return func(*args, **kwargs)
        replacement = self._replacements.get(func, func)
        for join in self._joins:
            replacement = join.around(replacement)
        return replacement(*args, **kwargs)


def _name_in_torch(attention: Callable[..., Tensor], dropout: Callable[..., Tensor]) -> None:
    """Let torch's own functions call these."""
    vars(F).update(scaled_dot_product_attention=attention, dropout=dropout)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: PLR0917
    if not training or not p:
        return x
    dropped: Tensor = torch.ops.aten.native_dropout(x, p, True)[0]
    return x.copy_(dropped) if inplace else dropped

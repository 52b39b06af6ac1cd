"""One recorded run of a whole module on meta tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import torch
from torch import Tensor, nn

from cost_models.errors import PiperError
from piper.annotation import tags_of
from piper.capture.backward import backward_of
from piper.capture.calling import loss_of
from piper.capture.choice import KernelChoice
from piper.capture.kernels import Kernels
from piper.capture.mixing import flash_mixing
from piper.capture.recorder import Recorder
from piper.capture.records import ReplayMismatchError, ReplayRecord, Value
from piper.capture.replay import replaying
from piper.capture.surroundings import failed, undisturbed
from piper.capture.tensors import address_of
from piper.errors import ModelError
from piper.tagging import all_called
from piper.user_code import user_code

MAX_NAMES = 16
"""Unannotated operators listed in the error."""


class UnannotatedError(ModelError):
    """A forward opens no scope at all."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A recorded run, the value that is its loss, and the names of the buffers that it changed."""

    recorder: Recorder
    loss: Value
    rewritten: tuple[str, ...] = ()

    @cached_property
    def tags(self) -> list[tuple[tuple[str, int], ...]]:
        """Return the tags of each segment."""
        return [tags_of(record.stack) for record in self.recorder.segments]

    @cached_property
    def outputs(self) -> list[list[Value]]:
        """Return for each segment the values that others take, in order of production; the loss first."""
        found: list[dict[Value, None]] = [{} for _ in self.recorder.segments]
        found[self.loss.producer].setdefault(self.loss)
        for record in self.recorder.segments:
            for value in record.inputs:
                if value.producer >= 0:
                    found[value.producer].setdefault(value)
        return [sorted(values, key=lambda value: (value is not self.loss, value.order)) for values in found]


def to_meta(module: nn.Module, *, dtype: torch.dtype) -> nn.Module:
    """Return a copy on the meta device; floating parameters and buffers in `dtype`, ties kept."""
    memo: dict[int, object] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(_shadow(parameter, dtype), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = _shadow(buffer, dtype)
    return copy.deepcopy(module, memo)


def record(
    module: nn.Module,
    *,
    where: str,
    micro_batch: int,
    seq_len: int,
    grad: bool,
    blocks: Sequence[tuple[nn.Module, int]],
    kernels: KernelChoice,
) -> Run:
    """Run the module on meta tensors [micro_batch, seq_len] and record it; raises ModelError.

    Args:
        module: annotated, on the meta device.
        where: its name, for messages.
        grad: also run the backward.
        blocks: repeated blocks, to be run once (see `piper.capture.replay`).
        kernels: for which kernels.
    """
    inputs = [torch.empty((micro_batch, seq_len), dtype=torch.int64, device="meta") for _ in range(2)]
    buffers = list(module.named_buffers())
    recorder = Recorder(
        where=where,
        parameters={
            parameter.untyped_storage()._cdata: name
            for name, parameter in reversed([*module.named_parameters()])
        },
        buffers=frozenset(address_of(buffer) for _, buffer in buffers),
        inputs=inputs,
        kernels=kernels,
    )
    recorder.regions.shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    with (
        undisturbed(module, where=where),
        all_called(module, where=where),
        replaying(blocks, recorder),
        torch.set_grad_enabled(grad),
        recorder.recording(),
        Kernels(recorder),
        flash_mixing(recorder),
    ):
        loss = _of_user(lambda: loss_of(module, *inputs), where=where, what="forward")
        if recorder.outside and any(isinstance(record, ReplayRecord) for record in recorder.segments):
            raise ReplayMismatchError  # a view between scopes belongs to the segment before it
        value = _checked_loss(loss, recorder, grad=grad)
        if grad and isinstance(loss, Tensor):
            parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
            _of_user(
                lambda: backward_of(recorder, [loss], takes=(), parameters=parameters),
                where=where,
                what="backward",
            )
        recorder.end()
    rewritten = [name for name, buffer in buffers if address_of(buffer) in recorder.rewritten]
    return Run(recorder=recorder, loss=value, rewritten=tuple(rewritten))


def _shadow(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(
        tensor, device="meta", dtype=dtype if tensor.dtype.is_floating_point else tensor.dtype
    )


def _of_user(run: Callable[[], object], *, where: str, what: str) -> object:
    try:
        with user_code():
            return run()
    except (PiperError, ReplayMismatchError):
        raise
    except Exception as error:
        raise failed(error, where=where, what=what) from error


def _refuse_unannotated(recorder: Recorder) -> NoReturn:
    names = ", ".join(list(dict.fromkeys(recorder.unannotated))[:MAX_NAMES])
    rule = f"run outside of every scope ({len(recorder.unannotated)} calls)"
    if recorder.opened:
        raise ModelError(
            where=recorder.where, field="unannotated operators", value=names, rule=rule,
            fix='put them into a scope: with piper.annotate("PP"): ...',
        )  # fmt: skip
    raise UnannotatedError(
        where=recorder.where, field="unannotated operators", value=names, rule=f"{rule}; no blocks repeat",
        fix='tag the parts: piper.annotate_modules(model, {"layers.{i}": "PP", ...})',
    )  # fmt: skip


def _checked_loss(loss: object, recorder: Recorder, *, grad: bool) -> Value:
    where = recorder.where
    if recorder.unannotated:
        _refuse_unannotated(recorder)
    if recorder.foreign:
        raise ModelError(
            where=where, field="constant tensor", value=recorder.foreign[0],
            rule="is neither a parameter nor a buffer nor made in forward",
            fix="register it: self.register_buffer(name, tensor, persistent=False)",
        )  # fmt: skip
    if not isinstance(loss, Tensor) or loss.dim() != 0 or loss.dtype != torch.float32:
        shown = f"{loss.dtype} {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ModelError(
            where=where, field="forward", value=shown,
            rule="must return the summed token loss (fp32, no dimension)",
            fix='end with F.cross_entropy(logits.float(), labels, reduction="sum")',
        )  # fmt: skip
    if recorder.book.storage_of(loss).number in recorder.averaged:
        raise ModelError(
            where=where, field="loss", value="a mean", rule="must be the sum of token losses",
            fix='give F.cross_entropy reduction="sum": the step divides by all tokens of the global batch',
        )  # fmt: skip
    value = recorder.book.value_of(loss)
    if value is None or value.producer < 0 or (grad and not loss.requires_grad):
        raise ModelError(
            where=where, field="loss", value="no gradient", rule="depends on no parameter that is trained",
            fix="compute it from the outputs of the model",
        )  # fmt: skip
    if value.producer != len(recorder.segments) - 1:
        raise ModelError(
            where=where, field="loss", value=f"segment {value.producer}",
            rule="is not made by the last segment",
            fix="compute the loss in the last scope of forward",
        )  # fmt: skip
    value.requires_grad = grad
    return value

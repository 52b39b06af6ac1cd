"""Recording a backward pass, and making tensors of a given layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from piper.capture.recorder import Recorder
from piper.capture.tensors import address_of

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]
"""Shape, strides, dtype, requires_grad."""


def backward_of(
    recorder: Recorder, roots: Sequence[Tensor], *, takes: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[bool]:
    """Record the backward from `roots`; returns for each of `takes` whether it got a gradient."""
    recorder.mark()
    with recorder.pause():
        root: Tensor = _Root.apply(recorder, *roots)  # type: ignore[no-untyped-call]
    recorder.begin_backward()
    grads = torch.autograd.grad(root, [*takes, *parameters], allow_unused=True)
    for tensor, grad in zip(takes, grads[: len(takes)], strict=True):
        if grad is not None:
            recorder.pass_gradient(grad, None)
            value = recorder.book.value_of(tensor)
            if value is not None:
                recorder.give_gradient(value, grad)
    users = recorder.users_of_parameters()
    for parameter, grad in zip(parameters, grads[len(takes) :], strict=True):
        name = recorder.parameters[address_of(parameter)]
        if grad is not None and users.get(name, 0) > 1:
            recorder.drop_sums(grad)
        elif grad is not None:
            recorder.keep_parameter_gradient(recorder.book.storage_of(grad).number)
    return [grad is not None for grad in grads[: len(takes)]]


def layout_of(tensor: Tensor) -> Layout:
    """Return the layout of a tensor."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def empty(layout: Layout) -> Tensor:
    """Return a meta tensor of a layout."""
    shape, stride, dtype, _ = layout
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


class _Root(torch.autograd.Function):
    """One number from which all roots get a gradient.

    `torch.autograd.grad` with gradients of its own would import sympy (see [Note: own shape rules]).
    """

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, *roots: Tensor) -> Tensor:
        ctx.recorder, ctx.roots = recorder, [layout_of(root) for root in roots]
        return roots[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.recorder.pause():
            return (None, *(empty(layout) for layout in ctx.roots))

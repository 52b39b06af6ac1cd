"""Which blocks of a module are alike: same class, options, parameter shapes, and children."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn

from piper.tagging import TaggedForward

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_MODULE = frozenset(vars(nn.Module()))


def repeated_blocks(module: nn.Module) -> list[tuple[nn.Module, int]]:
    """Return (block, signature) for every block that has an equal sibling; equal signatures, equal blocks."""
    signatures = Signatures()
    found: list[tuple[nn.Module, int]] = []
    for parent in module.modules():
        children = [(child, signatures.of(child)) for child in parent.children()]
        counts = Counter(signature for _, signature in children)
        found.extend(
            (child, signature)
            for child, signature in children
            if counts[signature] > 1 and not type(child).__module__.startswith("torch.")
        )
    return found


class Signatures:
    """Numbers modules so that two have one number if they compute the same from the same inputs."""

    def __init__(self) -> None:
        self._of_module: dict[int, int] = {}
        self._numbers: dict[Hashable, int] = {}

    def of(self, module: nn.Module) -> int:
        """Return the number of a module."""
        known = self._of_module.get(id(module))
        if known is None:
            content = self._content(module)
            known = self._of_module[id(module)] = self._numbers.setdefault(content, len(self._numbers))
        return known

    def _content(self, module: nn.Module) -> Hashable:
        if any(getattr(module, hooks) for hooks in _HOOKS):
            return "hooked", id(module)
        return (
            type(module),
            module.training,
            tuple((name, option_of(value)) for name, value in vars(module).items() if name not in _OF_MODULE),
            tuple((name, _layout(tensor)) for name, tensor in module._parameters.items()),
            tuple((name, _layout(tensor)) for name, tensor in module._buffers.items()),
            tuple(
                (name, None if child is None else self.of(child)) for name, child in module._modules.items()
            ),
        )


def option_of(value: Any) -> Hashable:
    """Return a comparable form of an option; unknown objects are equal only to themselves."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return type(value), value
    if isinstance(value, tuple | list):
        return type(value), tuple(option_of(item) for item in value)
    if isinstance(value, Mapping):
        return type(value), tuple((option_of(key), option_of(item)) for key, item in value.items())
    if isinstance(value, TaggedForward):
        return type(value), value.tags, option_of(value.own)
    return "object", id(value)


def _layout(tensor: torch.Tensor | None) -> Hashable:
    if tensor is None:
        return None
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad

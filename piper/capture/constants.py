"""Values of tensors that depend on shapes alone, for code that reads them while a model is captured.

[Note: known values]
On meta tensors there are no numbers, so `if positions[0] == 0:` cannot be answered. But what is made from
whole numbers alone (`torch.arange(seq)`, comparisons of such tensors, masks) has a value all the same. Each
such tensor remembers how it was made, without keeping any tensor alive; only when a value is read, the few
operators behind it run on the CPU. What depends on tokens, parameters or buffers has no value.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

READS = "_local_scalar_dense"
"""The operator behind `item()`, `tolist()`, `bool()` and `int()`."""

_LAYOUT = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(slots=True, eq=False)
class _Recipe:
    """How a tensor was made: an operator, its arguments (recipes in place of tensors), which result."""

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    item: int | None
    value: Tensor | None = None

    def evaluate(self) -> Tensor:
        """Return the value, on the CPU."""
        if self.value is None:
            args, kwargs = tree_map(_evaluated, (tuple(self.args), self.kwargs))
            result = self.func(*args, **kwargs)
            self.value = result if self.item is None else result[self.item]
        return self.value


class KnownValues:
    """Follows the operators of one run [Note: known values]."""

    def __init__(self) -> None:
        self._recipes: dict[int, dict[_LAYOUT, _Recipe]] = {}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def read(self, tensor: Tensor) -> int | float | bool | None:
        """Return the number in a tensor of one element, or None when it is not known."""
        recipe = self._recipe_of(tensor)
        if recipe is None:
            return None
        with torch.utils._python_dispatch._disable_current_modes():
            number: int | float | bool = recipe.evaluate().item()
        return number

    def note(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], *, result: Any) -> None:
        """Take an operator that has run."""
        made = _tensors(result)
        if not made:
            return
        if func._schema.is_mutable:
            for tensor in made:
                self._recipes.pop(tensor.untyped_storage()._cdata, None)
            return
        if torch.Tag.nondeterministic_seeded in func.tags or func._opname.startswith(("empty", "new_empty")):
            return
        given = [(tensor, self._recipe_of(tensor)) for tensor in _tensors((*args, *kwargs.values()))]
        if any(recipe is None for _, recipe in given):
            return
        recipes = {id(tensor): recipe for tensor, recipe in given}

        def without_tensors(leaf: Any) -> Any:
            return recipes[id(leaf)] if isinstance(leaf, Tensor) else leaf

        args, kwargs = tree_map(without_tensors, (tuple(args), kwargs))
        for item, tensor in enumerate(made):
            several = isinstance(result, list | tuple)
            self._keep(tensor, _Recipe(func, args, kwargs, item if several else None))

    def _recipe_of(self, tensor: Tensor) -> _Recipe | None:
        return self._recipes.get(tensor.untyped_storage()._cdata, {}).get(_layout(tensor))

    def _keep(self, tensor: Tensor, recipe: _Recipe) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._alive:

            def gone(_: object) -> None:
                self._recipes.pop(address, None)
                del self._alive[address]

            self._alive[address] = weakref.ref(storage, gone)
        self._recipes.setdefault(address, {})[_layout(tensor)] = recipe


def _layout(tensor: Tensor) -> _LAYOUT:
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _evaluated(leaf: Any) -> Any:
    if isinstance(leaf, _Recipe):
        return leaf.evaluate()
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in _tensors(value)]
    return []

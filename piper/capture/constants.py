"""Values of tensors that depend on shapes alone, for code that reads them while a model is captured.

[Note: known values]
On meta tensors there are no numbers, so `if positions[0] == 0:` cannot be answered. But what is made from
whole numbers alone (`torch.arange(seq)`, comparisons of such tensors, masks) has a value all the same. Each
such tensor remembers how it was made, without keeping any tensor alive; only when a value is read, the few
operators behind it run on the CPU. What depends on tokens, parameters or buffers has no value.

[Note: balanced routing]
One thing more has a value while costs are captured: the choice of experts. The indices that `topk`, `argmax`,
`max` or `sort` return for unknown scores are taken as balanced, every choice equally often, so that a loop
over experts (`nonzero`, `torch.where`, boolean masks, `tolist`) gets the shapes of balanced routing. How
uneven routing really is, is a parameter of the cost model. A program that is to run may not assume this.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

READS = "_local_scalar_dense"
"""The operator behind `item()`, `tolist()`, `bool()` and `int()`."""

SHAPED = frozenset({"nonzero", "bincount", "_unique", "_unique2", "unique_dim", "unique_consecutive",
                    "repeat_interleave"})  # fmt: skip
"""Operators whose shapes depend on the values of all their tensors."""

MASKED = frozenset({"index", "index_put", "index_put_"})
"""Operators that take masks or whole numbers as indices: argument 1."""

CHOICES = frozenset({"aten.topk.default", "aten.argmax.default", "aten.max.dim", "aten.sort.default",
                     "aten.sort.stable"})  # fmt: skip
"""Operators that choose among scores; their last result is what was chosen."""

_LAYOUT = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(slots=True, eq=False)
class _Recipe:
    """How a tensor was made: an operator, its arguments (recipes in place of tensors), which result.

    `balanced`: it builds on [Note: balanced routing].
    """

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    item: int | None
    balanced: bool = False
    value: Tensor | None = None

    def evaluate(self) -> Tensor:
        """Return the value, on the CPU."""
        if self.value is None:
            args, kwargs = tree_map(_evaluated, (tuple(self.args), self.kwargs))
            result = self.func(*args, **kwargs)
            self.value = result if self.item is None else result[self.item]
        return self.value


class KnownValues:
    """Follows the operators of one run [Note: known values].

    Args:
        routing: whether choices of experts are taken as balanced [Note: balanced routing].

    Attributes:
        assumed_balance: whether such a choice was looked at.
    """

    def __init__(self, *, routing: bool = False) -> None:
        self.routing = routing
        self.assumed_balance = False
        self._recipes: dict[int, dict[_LAYOUT, _Recipe]] = {}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def read(self, tensor: Tensor) -> int | float | bool | None:
        """Return the number in a tensor of one element, or None when it is not known."""
        recipe = self._recipe_of(tensor)
        if recipe is None:
            return None
        number: int | float | bool = self._value(recipe).item()
        return number

    def shaped(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return what an operator returns whose shapes depend on values, or None to ask torch."""
        if func._opname in SHAPED and all(self._recipe_of(t) for t in _tensors((*args, *kwargs.values()))):
            values = tree_map(self._known, (tuple(args), kwargs))
            with torch.utils._python_dispatch._disable_current_modes():
                made = func(*values[0], **values[1])
            return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, made)
        if func._opname == "masked_select" and (recipe := self._recipe_of(args[1])) is not None:
            return args[0].new_empty(int(self._value(recipe).expand(args[0].shape).sum()))
        if func._opname == "_to_copy" and kwargs.get("device") == torch.device("cpu"):  # `tolist`
            recipe = self._recipe_of(args[0])
            return None if recipe is None else self._value(recipe)
        if func._opname in MASKED and any(_is_mask(index) for index in args[1]):
            indices = [found for index in args[1] for found in self._places(index)]
            return func(args[0], indices, *args[2:], **kwargs)
        return None

    def _places(self, index: Any) -> list[Any]:
        """Return whole numbers in place of a mask whose value is known."""
        recipe = self._recipe_of(index) if _is_mask(index) else None
        if recipe is None:
            return [index]
        return [places.to("meta") for places in self._value(recipe).nonzero(as_tuple=True)]

    def _known(self, leaf: Any) -> Any:
        recipe = self._recipe_of(leaf) if isinstance(leaf, Tensor) else None
        return leaf if recipe is None else self._value(recipe)

    def _value(self, recipe: _Recipe) -> Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            self.assumed_balance = self.assumed_balance or recipe.balanced
            return recipe.evaluate()

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
            if self.routing and _chooses(func, args):
                self._keep(made[-1], _balanced(func._opname, args, made[-1]))
            return
        recipes = {id(tensor): recipe for tensor, recipe in given}
        balanced = any(recipe is not None and recipe.balanced for recipe in recipes.values())

        def without_tensors(leaf: Any) -> Any:
            return recipes[id(leaf)] if isinstance(leaf, Tensor) else leaf

        args, kwargs = tree_map(without_tensors, (tuple(args), kwargs))
        for item, tensor in enumerate(made):
            several = isinstance(result, list | tuple)
            self._keep(tensor, _Recipe(func, args, kwargs, item if several else None, balanced))

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


def _chooses(func: Any, args: Sequence[Any]) -> bool:
    """Return whether an operator chooses among scores (whole numbers, such as tokens, are none)."""
    return str(func) in CHOICES and bool(args[0].is_floating_point())


def _balanced(op: str, args: Sequence[Any], chosen: Tensor) -> _Recipe:
    """Return the recipe of a balanced choice among the scores args[0], with the layout of `chosen`."""
    scores = args[0]
    among = scores.shape[-1] if scores.dim() else 1
    each = among if op == "sort" else 1
    return _Recipe(_round_robin, (tuple(chosen.shape), among, each), {}, None, balanced=True)


def _round_robin(shape: tuple[int, ...], among: int, each: int) -> Tensor:
    """Return indices [*shape] that take every number below `among` equally often.

    Args:
        shape: of the choices; those of one token are in the last dimension, and differ.
        among: how many there are to choose from.
        each: 1: choices go round; else a token's first choice is one beyond the last token's.
    """
    count = math.prod(shape)
    rounds = torch.arange(count)
    return ((rounds if each == 1 else rounds + rounds // each) % among).view(shape)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


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

"""Functions of models that some framework has one kernel for: a capture may put it in their place."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

REPLACEABLE: dict[str, Callable[..., Tensor]] = {}
"""Name -> the function that modes of torch see, once its module is imported."""


def replaceable(name: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Let modes of torch see a function of a tensor as they see torch's own, under `name`."""

    def decorated(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(function)
        def seen(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if has_torch_function_unary(x):
                replaced: Tensor = handle_torch_function(seen, (x,), x, *args, **kwargs)
                return replaced
            return function(x, *args, **kwargs)

        REPLACEABLE[name] = seen
        return seen

    return decorated

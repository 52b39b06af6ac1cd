"""A user's own schedule, `my.py:function`: load the function from the file."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cost_models.documents import is_file
from piper.errors import StrategyError
from piper.user_code import user_code

_SHAPE = (
    "define a function f(*, num_pipeline_ranks, num_microbatches, virtual_stages_per_rank, costs, memory_cap)"
)


def is_user_function(text: str) -> bool:
    """Tell whether `text` has the form `FILE.py:FUNCTION`."""
    return ".py:" in text


def load_user_function(text: str, *, where: str) -> Callable[..., Any]:
    """Return the function that `FILE.py:FUNCTION` names.

    Raises: StrategyError if the file is missing or fails, or has no such function.
    """
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not is_file(path):
        raise _error(
            text, "names a file that does not exist", where, fix=f"give an existing file, not {file}"
        )
    spec = importlib.util.spec_from_file_location(f"piper_user_schedule_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise _error(text, "names a file that Python cannot load", where, fix="give a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        with user_code():
            spec.loader.exec_module(module)
    except Exception as error:
        rule = f"names a file that fails: {type(error).__name__}: {error}"
        raise _error(text, rule, where, fix=f"make `python {file}` run") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise _error(text, "names no function of that file", where, fix=f"in {file}, {_SHAPE}")
    found: Callable[..., Any] = function
    return found


def _error(value: str, rule: str, where: str, *, fix: str) -> StrategyError:
    return StrategyError(where=where, field="schedule", value=value, rule=rule, fix=fix)

"""A user's own schedule, `my.py:function`: load the function from the file."""

from __future__ import annotations

import importlib.util
import inspect
import traceback
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
        line = error.lineno if isinstance(error, SyntaxError) else _line(error, str(path))
        rule = f"names a file that fails: {type(error).__name__}: {error}{_at(file, line)}"
        raise _error(text, rule, where, fix=f"make `python {file}` run") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise _error(text, "names no function of that file", where, fix=f"in {file}, {_SHAPE}")
    found: Callable[..., Any] = function
    return found


def place_of(error: Exception, function: Callable[..., Any]) -> str:
    """Return ` (file:line)` of the user's code that raised (of the function, if none of it ran), or ""."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    return _at(code.co_filename, _line(error, code.co_filename) or code.co_firstlineno)


def _line(error: Exception, file: str) -> int | None:
    """Return the innermost line of a file that an error came through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return lines[-1] if lines else None


def _at(file: str, line: int | None) -> str:
    return "" if line is None else f" ({file}:{line})"


def _error(value: str, rule: str, where: str, *, fix: str) -> StrategyError:
    return StrategyError(where=where, field="schedule", value=value, rule=rule, fix=fix)

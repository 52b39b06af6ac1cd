"""Piper: plan, simulate, search and run distributed training.

Light on purpose: a public name is imported when it is first used, so `import piper` loads neither torch
nor numba. To add a public name: one line in `_PUBLIC`, and one under TYPE_CHECKING.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from piper.annotation import annotate
    from piper.api import compile_plan, register_schedule, search_strategies, simulate
    from piper.report.result import Result, load_result
    from piper.strategy import Strategy, load_strategy
    from piper.tagging import annotate_modules

_PUBLIC = {
    "Result": "piper.report.result",
    "Strategy": "piper.strategy",
    "annotate": "piper.annotation",
    "annotate_modules": "piper.tagging",
    "compile_plan": "piper.api",
    "load_result": "piper.report.result",
    "load_strategy": "piper.strategy",
    "register_schedule": "piper.api",
    "search_strategies": "piper.api",
    "simulate": "piper.api",
}
"""Public name -> the module that has it."""

__all__ = [
    "Result",
    "Strategy",
    "annotate",
    "annotate_modules",
    "compile_plan",
    "load_result",
    "load_strategy",
    "register_schedule",
    "search_strategies",
    "simulate",
]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'piper' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

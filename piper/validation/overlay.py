"""Parameters: single figures of the catalogue's files, changed for a while.

A parameter is named "gpu|cluster|stack:NAME:section.key", and its value is what the file would say there
("12us", 0.74). Files that extend the changed one inherit the change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cost_models.catalogue import REPLACED

Overlay = tuple[tuple[str, str | float], ...]
"""(name of a parameter, value) pairs."""


@contextmanager
def overlaid(parameters: Overlay) -> Iterator[None]:
    """Let the catalogue read these figures in place of those of its files, inside the `with` block."""
    token = REPLACED.set({**REPLACED.get(), **dict(parameters)})
    try:
        yield
    finally:
        REPLACED.reset(token)

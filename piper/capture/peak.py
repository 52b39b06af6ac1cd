"""The largest transient memory of a pass, from the moments at which it may be reached."""

from __future__ import annotations

from collections.abc import Sequence

Moment = tuple[int, int]
"""Bytes beyond what a pass keeps, after an allocation: all, and those left whole by tensor parallelism."""


def peak_of(moments: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the bytes of the highest moment (the first of equals), and of these what is left whole."""
    size, whole = max(moments, key=lambda moment: moment[0])
    size = max(0, size)
    return size, min(size, max(0, whole))

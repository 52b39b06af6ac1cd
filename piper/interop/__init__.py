"""Formats of other tools.

To add one to export to: write `piper/interop/<name>.py` with a function `write(result, path, *, rank) -> str`
that writes the file and returns one line about it for people, and add one line to `EXPORTS`. `result.plan` is
what ran (None: not at hand), `rank` the only rank that is wanted or None.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from cost_models.errors import nearest
from piper.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A kind of file.

    Args:
        target: module:function that writes it.
        description: for people.
        needs_plan: whether a timeline alone is not enough.
    """

    target: str
    description: str
    needs_plan: bool

    def writer(self) -> Callable[..., str]:
        """Import the function."""
        module, _, function = self.target.partition(":")
        found: Callable[..., str] = getattr(importlib.import_module(module), function)
        return found


EXPORTS = {
    "memory-snapshot": Export(
        target="piper.interop.memory_snapshot:write",
        description="PyTorch memory snapshot; pytorch.org/memory_viz opens it",
        needs_plan=True,
    ),
    "chrome": Export(
        target="piper.interop.chrome:write",
        description="Chrome trace; ui.perfetto.dev opens it",
        needs_plan=False,
    ),
}

LATER = ("megatron-args", "torchtitan", "deepspeed", "accelerate", "pipelining-csv", "slurm")


def export_of(kind: str) -> Export:
    """Return the export of a name; raises JobError for one that is not known, or not there yet."""
    if kind in EXPORTS:
        return EXPORTS[kind]
    known = f"available: {', '.join(EXPORTS)}"
    raise JobError(
        where="piper export",
        field="KIND",
        value=kind,
        rule="is not available in this version" if kind in LATER else "is not known",
        fix=known if kind in LATER else f"{nearest(kind, EXPORTS)} ({known})",
    )

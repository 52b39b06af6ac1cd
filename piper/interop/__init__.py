"""Formats of other tools.

To add one to export to: write `piper/interop/<name>.py` with a function `write(result, path, *, rank) -> str`
that writes the file and returns one line about it for people, and add one line to `EXPORTS`. `result.plan` is
what ran (None: not at hand), `rank` the only rank that is wanted or None.

To add one to import from: write `piper/interop/<name>.py` with a function
`read(paths, *, name, **options)` whose result has `text` (the file to write), `facts` (for `--json`),
`warnings` and `notices`, and add one line to `IMPORTS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

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
        return _function(self.target)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """A kind of file that is read.

    Args:
        target: module:function that reads it.
        description: for people.
    """

    target: str
    description: str

    def reader(self) -> Callable[..., Any]:
        """Import the function."""
        return _function(self.target)


IMPORTS = {
    "nccl-tests": Import(
        target="piper.interop.nccl_tests:read",
        description="logs of nccl-tests; makes a cluster file with the measured times",
    ),
}

LATER_IMPORTS = (
    "hf", "megatron-args", "torchtitan", "deepspeed", "accelerate", "pipelining-csv", "kineto", "log",
)  # fmt: skip


def import_of(kind: str) -> Import:
    """Return the import of a name; raises JobError for one that is not known, or not there yet."""
    if kind in IMPORTS:
        return IMPORTS[kind]
    raise _unknown("piper import", kind, known=IMPORTS, later=LATER_IMPORTS)


def export_of(kind: str) -> Export:
    """Return the export of a name; raises JobError for one that is not known, or not there yet."""
    if kind in EXPORTS:
        return EXPORTS[kind]
    raise _unknown("piper export", kind, known=EXPORTS, later=LATER)


def _unknown(where: str, kind: str, *, known: Collection[str], later: Collection[str]) -> JobError:
    available = f"available: {', '.join(known)}"
    return JobError(
        where=where,
        field="KIND",
        value=kind,
        rule="is not available in this version" if kind in later else "is not known",
        fix=available if kind in later else f"{nearest(kind, [*known])} ({available})",
    )


def _function(target: str) -> Callable[..., Any]:
    module, _, function = target.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found

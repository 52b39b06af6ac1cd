"""Compiled plans on disk, for those who compile the same jobs again and again.

[Note: the plan store]
A file's name is a hash of all that decides its plan: the model's fingerprint, the resolved strategy, what the
job says of training, and the source of the compiler; nothing in it grows old. A file is written whole and
renamed into place, and its first line holds the hash of the rest: what is cut off or foreign is compiled
anew. Plans are pickled, but only our plan classes and numpy's arrays are read: no other code runs. What was
not used for longest is deleted when the folder holds more than `MAX_BYTES`. A folder that cannot be written
costs time, nothing else.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import secrets
import zlib
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from simulator.plan import Plan

MAX_BYTES = 2**30
"""Above this the folder is pruned when it is opened; 2,000 plans of published runs take 150 MB."""

SUFFIX = ".stored-plan"
_LEVEL = 1
"""Of zlib: a tenth of the bytes already, in a third of the time of the default."""

_SOURCES = ("piper", "simulator/plan", "cost_models")
"""Folders whose source decides a plan, beside each other."""

_READABLE = ("simulator.plan.", "cost_models.ops")
_OF_NUMPY = {
    ("numpy", "dtype"), ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"), ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.numeric", "_frombuffer"), ("numpy.core.numeric", "_frombuffer"),
}  # fmt: skip
"""What a file may name."""
_OWN = (__name__, "revived")


class PlanStore:
    """A folder of plans; see [Note: the plan store].

    Args:
        folder: made when the first plan is kept.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        with suppress(OSError):
            self._prune()

    def load(self, key: str) -> Plan | None:
        """Return the plan of a key, or None: it is not here, or cannot be read."""
        path = self.folder / f"{key}{SUFFIX}"
        try:
            head, _, body = path.read_bytes().partition(b"\n")
            os.utime(path)
        except OSError:
            return None
        if head != _head(body):
            return None
        try:
            found = _Reader(io.BytesIO(zlib.decompress(body))).load()
        except (pickle.UnpicklingError, zlib.error, EOFError, AttributeError, TypeError, ValueError):
            return None
        return found if isinstance(found, Plan) else None

    def keep(self, key: str, plan: Plan) -> None:
        """Write a plan."""
        content = io.BytesIO()
        _Writer(content, protocol=5).dump(plan)
        body = zlib.compress(content.getbuffer(), _LEVEL)
        unfinished = self.folder / f".{key[:16]}.{secrets.token_hex(8)}.tmp"
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(_head(body) + b"\n" + body)
            unfinished.replace(self.folder / f"{key}{SUFFIX}")

    def _prune(self) -> None:
        status = [(path.stat(), path) for path in self.folder.glob(f"*{SUFFIX}")]
        total = 0
        for stat, path in sorted(status, key=lambda pair: -pair[0].st_mtime):
            total += stat.st_size
            if total > MAX_BYTES:
                path.unlink(missing_ok=True)


def plan_key(*parts: object) -> str:
    """Return the key of a plan: of all that decides it, apart from our source."""
    digest = hashlib.sha256(_sources())
    for part in parts:
        digest.update(f"{part!r}\0".encode())
    return digest.hexdigest()


@cache
def _sources() -> bytes:
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for folder in _SOURCES:
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.digest()


def _head(body: bytes) -> bytes:
    return f"piper plan {hashlib.sha256(body).hexdigest()}".encode()


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def revived(kind: type, values: tuple[Any, ...]) -> Any:
    """Return a frozen object with these values of its fields, which were checked before it was written."""
    made: Any = object.__new__(kind)
    for name, value in zip(_names(kind), values, strict=True):
        object.__setattr__(made, name, value)
    return made


class _Writer(pickle.Pickler):
    """Writes objects as the values of their fields: dataclasses look up their fields for each object."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how to make an object again, for what is no dataclass as pickle would."""
        if isinstance(obj, type) or not is_dataclass(obj):
            return NotImplemented
        kind: type = type(obj)
        return revived, (kind, tuple(getattr(obj, name) for name in _names(kind)))


class _Reader(pickle.Unpickler):
    """Reads plans and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that a plan is made of; raises UnpicklingError for others."""
        if module.startswith(_READABLE) or (module, name) in _OF_NUMPY or (module, name) == _OWN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a plan")

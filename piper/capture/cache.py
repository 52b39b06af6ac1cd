"""The cache of captures on disk, so that a known model is planned without loading torch.

[Note: the cache]
A file's name is a hash of all that decides its content: the model's fingerprint (config, source of our
models), dtype, kernels, sizes, the source of capture, and the version of torch; nothing in it grows old. A
file is written whole and renamed into place, so that processes may share the folder: two that write the same
file write the same bytes. Its first line tells the format and the hash of the rest: a file that is cut off,
damaged or foreign is captured anew. What was not used for longest is deleted when the folder holds more than
`MAX_BYTES`. A folder that cannot be read or written costs time, nothing else. All of this is told as a
`CacheNotice`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import secrets
import warnings
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from piper.capture.codec import FORMAT
from piper.errors import CacheNotice

MAX_BYTES = 256 * 2**20
"""Above this the cache is pruned; an entry of the largest model takes about 0.3 MB."""

SUFFIX = ".capture"

_UNFINISHED = f".{'?' * 16}.{'?' * 16}.tmp"
"""Names of files that are being written, as a pattern."""

_STALE_S = 3600
"""Unfinished files that are older were left by a process that was ended."""

_SOURCES = ("capture/*.py", "graph/captured.py", "annotation.py", "tagging.py", "../cost_models/ops.py")
"""Files that decide what capture finds, relative to the package `piper`."""


def cache_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder: the argument, else $PIPER_CACHE_DIR, else ~/.cache/piper."""
    return Path(cache_dir or os.environ.get("PIPER_CACHE_DIR") or Path.home() / ".cache" / "piper")


def cache_key(fingerprint: str, *parts: object) -> str:
    """Return the key of an entry: of a model's fingerprint and all else that decides it."""
    digest = hashlib.sha256()
    for part in (fingerprint, *parts):
        digest.update(f"{part}\0".encode())
    digest.update(_torch_version())
    digest.update(_sources())
    return digest.hexdigest()


def _torch_version() -> bytes:
    """Return torch's own version file, found without importing torch (or the slow importlib.metadata)."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return b"no torch"
    return Path(found.origin).with_name("version.py").read_bytes()


@cache
def _sources() -> bytes:
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for pattern in _SOURCES:
        for file in sorted(package.glob(pattern)):
            digest.update(file.read_bytes())
    return digest.digest()


def load(folder: Path, key: str) -> dict[str, Any] | None:
    """Return a cached object, or None when there is none, or none that can be read."""
    path = folder / f"{key}{SUFFIX}"
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _tell(f"{folder} cannot be read ({error.strerror}): captured anew")
        return None
    head, _, body = content.partition(b"\n")
    if head != _head(body):
        _tell(f"{path} is damaged: captured anew")
        return None
    with suppress(OSError):
        os.utime(path)
    found: dict[str, Any] = json.loads(body)
    return found


def store(folder: Path, key: str, entry: dict[str, Any]) -> None:
    """Write an object; a folder that cannot be written to only means no cache."""
    body = json.dumps(entry, separators=(",", ":")).encode()
    unfinished = folder / f".{key[:16]}.{secrets.token_hex(8)}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with unfinished.open("xb") as file:
                file.write(_head(body) + b"\n" + body)
            written = unfinished.replace(folder / f"{key}{SUFFIX}")
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        prune(folder, max_bytes=MAX_BYTES, now_s=written.stat().st_mtime)
    except OSError as error:
        _tell(f"nothing can be kept in {folder} ({error.strerror}): set PIPER_CACHE_DIR to another folder")


def prune(folder: Path, *, max_bytes: int, now_s: float) -> None:
    """Delete unfinished files that are old, and the entries used longest ago beyond `max_bytes`.

    Files that are not ours stay. Another process may delete at the same time.
    """
    for file in _ages(folder.glob(_UNFINISHED)):
        if file[0] < now_s - _STALE_S:
            file[2].unlink(missing_ok=True)
    total = 0
    for _, size, path in sorted(_ages(folder.glob(f"*{SUFFIX}")), reverse=True):
        total += size
        if total > max_bytes:
            path.unlink(missing_ok=True)


def _ages(paths: Iterable[Path]) -> list[tuple[float, int, Path]]:
    """Return (time of last use, bytes, path) of files that are still there."""
    found = []
    for path in paths:
        with suppress(FileNotFoundError):
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    return found


def _head(body: bytes) -> bytes:
    return f"piper capture {FORMAT} {hashlib.sha256(body).hexdigest()}".encode()


def _tell(text: str) -> None:
    warnings.warn(f"cache: {text}", CacheNotice, stacklevel=1)

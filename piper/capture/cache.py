"""The cache of captured models on disk, so that a known model is planned without loading torch.

A file's name is a hash of all that decides its content: the model's fingerprint (config, source of its
family), sizes, dtype, the source of capture, and the version of torch. Files are written whole and renamed
into place, so that processes may share the folder; one that cannot be read is captured anew.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from piper.capture.codec import from_json, to_json
from piper.graph.captured import CapturedModel

_SOURCES = ("capture/*.py", "graph/captured.py", "annotation.py", "../cost_models/ops.py")
"""Files that decide what capture finds, relative to the package `piper`."""


def cache_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder: the argument, else $PIPER_CACHE_DIR, else ~/.cache/piper."""
    return Path(cache_dir or os.environ.get("PIPER_CACHE_DIR") or Path.home() / ".cache" / "piper")


def cache_key(fingerprint: str, *, micro_batch: int, seq_len: int, dtype: str) -> str:
    """Return the key of one capture."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for part in (fingerprint, micro_batch, seq_len, dtype):
        digest.update(f"{part}\0".encode())
    digest.update(_torch_version())
    for pattern in _SOURCES:
        for file in sorted(package.glob(pattern)):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _torch_version() -> bytes:
    """Return torch's own version file, found without importing torch (or the slow importlib.metadata)."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return b"no torch"
    return Path(found.origin).with_name("version.py").read_bytes()


def load(folder: Path, key: str) -> CapturedModel | None:
    """Return the cached model, or None when there is none, or none that can be read."""
    try:
        return from_json(json.loads((folder / f"{key}.json").read_bytes()))
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None


def store(folder: Path, key: str, model: CapturedModel) -> None:
    """Write the model; a folder that cannot be written to only means no cache."""
    text = json.dumps(to_json(model), separators=(",", ":"))
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{key[:16]}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(temporary).replace(folder / f"{key}.json")
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise

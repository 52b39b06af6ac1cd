"""Catalogue entries, fast: YAML is parsed once, when an entry is written.

`catalogue/index.json` holds every entry as it was read, with the digest of its file. An entry whose file has
changed since is read from the file. A test holds the index complete (renew: pytest --update-golden).
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from piper.models import CATALOGUE

FOLDER = Path(__file__).parent / "catalogue"
INDEX = FOLDER / "index.json"


@cache
def read_entry(name: str) -> dict[str, Any]:
    """Return a catalogue entry: `aliases`, `source`, `published` if it is, `config`; not to be changed."""
    text = (FOLDER / CATALOGUE[name]).read_bytes()
    indexed = _index().get(name)
    if indexed is not None and indexed["sha256"] == digest(text):
        found: dict[str, Any] = indexed["entry"]
        return found
    return parse_entry(text)


def parse_entry(text: bytes) -> dict[str, Any]:
    """Return the entry that a YAML file states."""
    from ruamel.yaml import YAML

    entry: dict[str, Any] = YAML(typ="safe").load(text.decode())
    return entry


def digest(text: bytes) -> str:
    """Return the key of a file's contents."""
    return hashlib.sha256(text).hexdigest()


@cache
def _index() -> dict[str, Any]:
    if not INDEX.exists():
        return {}
    index: dict[str, Any] = json.loads(INDEX.read_text(encoding="utf-8"))
    return index

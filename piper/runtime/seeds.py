"""Seeds that depend on names, never on who asks or when: the root of equal runs on every layout."""

from __future__ import annotations

import hashlib

_BYTES = 8


def seed_of(*parts: object) -> int:
    """Return a 63-bit seed from the text of all parts (SHA-256)."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:_BYTES], "little") >> 1

"""Read a file that the user named, and JSON or YAML in it: whatever can be wrong there is one error.

Every reader of user files goes through here, so that none of them forgets a way in which files are broken;
each turns `UnreadableError` into an error that names its own field and fix.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MOST_VALUES = 10**6
"""A YAML file of a few lines can stand for more values than there is memory, or for endlessly many."""

GZIP_MAGIC = b"\x1f\x8b"


class UnreadableError(Exception):
    """A file or text that cannot be read.

    Args:
        rule: what is wrong; it stands after the name of the file in a message.
        line, column: where in the text, counted from 1, when known.
        missing: no such file.
    """

    def __init__(
        self, rule: str, *, line: int | None = None, column: int | None = None, missing: bool = False
    ) -> None:
        super().__init__(rule)
        self.rule = rule
        self.line = line
        self.column = column
        self.missing = missing

    def place(self, where: str) -> str:
        """Return `where:line:column`, as far as known."""
        return where if self.line is None else f"{where}:{self.line}:{self.column}"


def exists(path: Path) -> bool:
    """Tell whether a file or folder is there; text that can be no path, or may not be looked at, is not."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_file(path: Path) -> bool:
    """Tell whether a file is there, as `exists`."""
    return exists(path) and path.is_file()


def is_folder(path: Path) -> bool:
    """Tell whether a folder is there, as `exists`."""
    return exists(path) and path.is_dir()


def read_bytes(path: Path) -> bytes:
    """Return what the file holds, decompressed if it begins as gzip does; raises UnreadableError."""
    return read_head(path, -1)


def read_head(path: Path, size_bytes: int) -> bytes:
    """Return the first bytes of what `read_bytes` returns; -1: all of them."""
    try:
        with path.open("rb") as file:
            packed = file.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC)
            return gzip.GzipFile(fileobj=file).read(size_bytes) if packed else file.read(size_bytes)
    except FileNotFoundError:
        raise UnreadableError("does not exist", missing=True) from None
    except OSError as problem:
        raise UnreadableError(f"cannot be read: {problem.strerror or problem}") from None
    except (EOFError, zlib.error) as problem:
        raise UnreadableError(f"cannot be read: it begins as gzip, but {problem}") from None
    except ValueError as problem:
        raise UnreadableError(f"is no path: {problem}") from None


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file (a byte order mark is skipped); raises UnreadableError."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise UnreadableError(f"cannot be read: it is no text in UTF-8 ({problem})") from None


def parse_json(text: str) -> Any:
    """Return the value of a JSON text; a key given twice is refused. Raises UnreadableError."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as problem:
        raise UnreadableError(
            f"is not valid JSON: {problem.msg}", line=problem.lineno, column=problem.colno
        ) from None
    except RecursionError:
        raise UnreadableError("is nested too deeply") from None
    except ValueError as problem:
        raise UnreadableError(f"is not valid JSON: {problem}") from None


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text (plain values only, no tags that run code); raises UnreadableError."""
    from ruamel.yaml import YAML  # 60 ms, needed only here
    from ruamel.yaml.error import YAMLError

    try:
        value = YAML(typ="safe", pure=True).load(text)
    except YAMLError as problem:
        raise _yaml_problem(problem) from None
    except RecursionError:
        raise UnreadableError("is nested too deeply") from None
    except ValueError as problem:
        raise UnreadableError(f"has a value that is not YAML: {problem}") from None
    _require_tree(value)
    return value


def yaml_text(value: Mapping[str, Any]) -> str:
    """Return a mapping of plain values as YAML in block style, keys in their order."""
    from ruamel.yaml import YAML  # 60 ms, needed only here

    writer = YAML()
    writer.width = 110
    writer.default_flow_style = False
    text = io.StringIO()
    writer.dump(value, text)
    return text.getvalue()


def _require_tree(value: object) -> None:
    """Refuse aliases that contain themselves, and aliases of aliases that stand for a flood of values."""
    waiting, seen = [value], 0
    while waiting:
        seen += 1
        if seen > MOST_VALUES:
            raise UnreadableError(f"stands for more than {MOST_VALUES} values, by aliases of aliases")
        entry = waiting.pop()
        if isinstance(entry, dict):
            waiting.extend(entry.values())
        elif isinstance(entry, list | set):
            waiting.extend(entry)


def _yaml_problem(problem: Any) -> UnreadableError:
    mark = getattr(problem, "problem_mark", None)
    what = getattr(problem, "problem", None) or str(problem).splitlines()[0]
    rule = f"is not valid YAML: {what}"
    return (
        UnreadableError(rule)
        if mark is None
        else UnreadableError(rule, line=mark.line + 1, column=mark.column + 1)
    )


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return found

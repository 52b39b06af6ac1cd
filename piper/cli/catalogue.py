"""What the catalogue commands share: a list of entries, or one entry in detail."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from piper.cli.output import emit

SCHEMA_VERSION = 1

GROUPED_FROM = 100_000
"""Whole numbers from here on are printed in groups of three digits (in text; JSON has plain numbers)."""


LONGEST_LIST = 90
"""A list that takes more characters is printed one entry a line."""


def show_list(
    kind: str, entries: Sequence[Mapping[str, Any]], *, columns: Mapping[str, str], as_json: bool
) -> None:
    """Print all entries: with `--json` whole, else as a table.

    Args:
        kind: plural word, the key of the JSON list.
        entries: one object each.
        columns: heading -> key of the entry.
        as_json: print JSON.
    """
    emit(
        {"schema_version": SCHEMA_VERSION, kind: list(entries)},
        as_json=as_json,
        text=lambda: _table(entries, columns),
    )


def show_entry(
    entry: Mapping[str, Any], *, as_json: bool, text_entry: Mapping[str, Any] | None = None
) -> None:
    """Print one entry in detail: with `--json` whole, else key by key, nested ones indented.

    Args:
        entry: the object.
        as_json: print JSON.
        text_entry: what people read instead, where the object is too long.
    """
    emit(
        {"schema_version": SCHEMA_VERSION, **entry},
        as_json=as_json,
        text=lambda: "\n".join(_lines(text_entry or entry, 0)),
    )


def names_of(name: str, aliases: Mapping[str, str]) -> list[str]:
    """Return the other names of an entry."""
    return [alias for alias, of in aliases.items() if of == name]


def plain(value: Any) -> Any:
    """Turn a dataclass, mapping or sequence into JSON values; what has no bound (infinity) is null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {_key(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def _key(key: Any) -> str:
    return "x".join(map(str, key)) if isinstance(key, tuple) else str(plain(key))


def _table(entries: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    from piper.report.summary import aligned

    rows = [list(columns), *([_cell(entry[key]) for key in columns.values()] for entry in entries)]
    return "\n".join(aligned(rows, left_columns=len(columns)))


def _cell(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value))
    if value is None or value == {}:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= GROUPED_FROM:
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _lines(entry: Mapping[str, Any], depth: int) -> list[str]:
    found = []
    for key, value in entry.items():
        if isinstance(value, Mapping) and value:
            found += [f"{'  ' * depth}{key}", *_lines(value, depth + 1)]
        elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
            for each in value:
                found += [f"{'  ' * depth}{key}", *_lines(each, depth + 1)]
        elif isinstance(value, list | tuple) and len(", ".join(map(_cell, value))) > LONGEST_LIST:
            found += [f"{'  ' * depth}{key}", *(f"{'  ' * (depth + 1)}{_cell(each)}" for each in value)]
        else:
            found.append(f"{'  ' * depth}{key}: {_cell(value) or '-'}")
    return found

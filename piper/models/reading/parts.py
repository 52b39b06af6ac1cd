"""Any part of `piper.models.shape` from a JSON object with its fields; every refusal names the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from cost_models.errors import LARGEST_COUNT, nearest
from piper.errors import ModelError

KIND = "kind"
"""Names the class where a field may be one of several: {"kind": "LatentAttention", ...}."""


def read_part(kind: type, value: object, *, where: str, field: str) -> Any:
    """Return the part of class `kind` that a JSON object states.

    Args:
        kind: a dataclass of `piper.models.shape`.
        value: the object.
        where, field: the file, and the path of the object in it, for messages.
    Raises: ModelError for a key that is unknown or missing, and for a value of the wrong type.
    """
    if not isinstance(value, Mapping):
        raise _error(where, field, value, f"must be an object with the keys of {kind.__name__}")
    hints = hints_of(kind)
    for name in value:
        if name not in hints:
            rule, fix = f"is no field of {kind.__name__}", nearest(str(name), hints)
            raise ModelError(where=where, field=f"{field}.{name}", value=value[name], rule=rule, fix=fix)
    found = {}
    for entry in fields(kind):
        path = f"{field}.{entry.name}"
        if entry.name in value:
            found[entry.name] = read_value(hints[entry.name], value[entry.name], where=where, field=path)
        elif entry.default is MISSING:
            raise _error(where, path, None, f"is missing in {kind.__name__}")
    return kind(**found)


def read_value(hint: Any, value: object, *, where: str, field: str) -> Any:
    """Return a JSON value as the type that a field has; raises ModelError."""
    origin = get_origin(hint)
    if origin is UnionType or str(origin) == "typing.Union":
        return _one_of(get_args(hint), value, where=where, field=field)
    if origin is Literal:
        known = get_args(hint)
        if value not in known:
            fix = nearest(str(value), known)
            raise ModelError(where=where, field=field, value=value, rule="is not known", fix=fix)
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise _error(where, field, value, "must be a list")
        inner = get_args(hint)[0]
        return tuple(read_value(inner, entry, where=where, field=field) for entry in value)
    if is_dataclass(hint):
        return read_part(hint, value, where=where, field=field)  # type: ignore[arg-type]
    return _plain(hint, value, where=where, field=field)


@cache
def hints_of(kind: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields."""
    return get_type_hints(kind)


def _one_of(hints: tuple[Any, ...], value: object, *, where: str, field: str) -> Any:
    if value is None:
        if NoneType in hints:
            return None
        raise _error(where, field, value, "must not be null")
    rest = [hint for hint in hints if hint is not NoneType]
    if len(rest) == 1:
        return read_value(rest[0], value, where=where, field=field)
    if not isinstance(value, Mapping):
        raise _error(where, field, value, "must be an object")
    named = {hint.__name__: hint for hint in rest}
    name = value.get(KIND, rest[0].__name__)
    if name not in named:
        fix = nearest(str(name), named)
        raise ModelError(where=where, field=f"{field}.{KIND}", value=name, rule="is not known", fix=fix)
    without = {key: entry for key, entry in value.items() if key != KIND}
    return read_part(named[name], without, where=where, field=field)


def _plain(hint: Any, value: object, *, where: str, field: str) -> Any:
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str):
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int and number and isinstance(value, int) and 0 <= value <= LARGEST_COUNT:
        return value
    if hint is float and number and math.isfinite(value):  # type: ignore[arg-type]
        return float(value)  # type: ignore[arg-type]
    names = {bool: "true or false", str: "text", int: "a whole number >= 0", float: "a number"}
    raise _error(where, field, value, f"must be {names[hint]}")


def _error(where: str, field: str, value: object, rule: str) -> ModelError:  # noqa: PLR0917
    fix = "docs/models.md lists the fields of every part"
    return ModelError(where=where, field=field, value=value, rule=rule, fix=fix)

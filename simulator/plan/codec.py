"""Plan files: `Plan` to one JSON document and back, exactly (format: docs/plan-format.md).

The document mirrors the dataclasses of `simulator.plan`, field by field; columns are lists of whole
numbers. Reading is strict: a missing or unknown key, a wrong type, a ragged column or an index out of
range is a `PlanError` that names the place as a path, e.g. `device_plans[0].tasks.stream`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import types
import typing
import zlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from cost_models.errors import InputError
from simulator.errors import PlanError
from simulator.plan.indices import faults
from simulator.plan.plan import SCHEMA_VERSION, IndexLists, Plan

KIND = "piper-plan"

_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_LEVEL = 1
"""Fastest: columns shrink about tenfold at any level, and loading is what users wait for."""
_SHOWN_CHARACTERS = 60
_FIX_FILE = "write the plan again with --plan-out (format: docs/plan-format.md)"


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write `plan` to `path`, compressed when the name ends in .gz; same plan, same bytes.

    Raises: PlanError when the file cannot be written.
    """
    path = Path(path)
    data = plan_to_bytes(plan)
    if path.suffix == ".gz":
        data = gzip.compress(data, _GZIP_LEVEL, mtime=0)
    try:
        path.write_bytes(data)
    except OSError as error:
        raise PlanError(
            where=str(path),
            field="file",
            value=path.name,
            rule=f"cannot be written: {error.strerror}",
            fix="give a file in an existing folder that you may write to",
        ) from error


def load_plan(path: str | Path) -> Plan:
    """Read a plan file, compressed or not.

    Raises: PlanError when it is missing, not JSON, no plan, of another version, or contradicts itself.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        rule = (
            "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        )
        fix = "give a file that `piper simulate ... --plan-out FILE` wrote"
        raise PlanError(where=str(path), field="file", value=path.name, rule=rule, fix=fix) from error
    return bytes_to_plan(data, where=str(path))


def plan_to_bytes(plan: Plan) -> bytes:
    """Return the plan as JSON text in its one canonical form: fields in order, one top-level key a line."""
    document = {"kind": KIND, "schema_version": plan.schema_version}
    document |= {name: value for name, value in _encode(plan).items() if name not in document}
    try:
        lines = [
            f"{json.dumps(key)}:{json.dumps(value, separators=(',', ':'), allow_nan=False)}"
            for key, value in document.items()
        ]
    except (TypeError, ValueError) as error:
        raise PlanError(
            where="plan",
            field="directives",
            value=plan.strategy,
            rule=f"must be plain JSON values ({error})",
            fix="use text, finite numbers, lists and objects in directives",
        ) from error
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def bytes_to_plan(data: bytes, *, where: str = "plan") -> Plan:
    """Read what `plan_to_bytes` wrote (or its gzip); `where` names the source in errors.

    Raises: PlanError.
    """
    document = _parse(data, where)
    body = {key: value for key, value in _require_plan(document, where).items() if key != "kind"}
    plan: Plan = _decoder(Plan)(body, _Place(where, ""))
    for fault in faults(plan):
        raise PlanError(
            where=where,
            field=f"{fault.place}",
            value=fault.value,
            rule=fault.rule,
            fix=_FIX_FILE,
        )
    return plan


def plan_hash(plan: Plan) -> str:
    """Return the SHA-256 of the canonical form without `directive_places`.

    Equal for equal plans, whatever the order of dict keys, and wherever the strategy was written.
    """
    return hashlib.sha256(plan_to_bytes(replace(plan, directive_places=()))).hexdigest()


class _Place:
    """Where in the document we are: the file, and the path of keys inside it."""

    __slots__ = ("path", "where")

    def __init__(self, where: str, path: str) -> None:
        self.where = where
        self.path = path

    def key(self, name: str) -> _Place:
        return _Place(self.where, f"{self.path}.{name}" if self.path else name)

    def item(self, index: int) -> _Place:
        return _Place(self.where, f"{self.path}[{index}]")

    def refuse(self, value: object, rule: str) -> NoReturn:
        raise PlanError(
            where=self.where, field=self.path or "plan", value=_short(value), rule=rule, fix=_FIX_FILE
        )


def _parse(data: bytes, where: str) -> object:
    try:
        text = (gzip.decompress(data) if data.startswith(_GZIP_MAGIC) else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        rule = f"is neither JSON text nor gzip of it ({error})"
        raise PlanError(
            where=where, field="file", value=Path(where).name, rule=rule, fix=_FIX_FILE
        ) from error
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise PlanError(
            where=f"{where}:{error.lineno}:{error.colno}",
            field="file",
            value=Path(where).name,
            rule=f"is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})",
            fix=_FIX_FILE,
        ) from error
    except ValueError as error:
        rule = f"is not valid JSON: {error}"
        raise PlanError(
            where=where, field="file", value=Path(where).name, rule=rule, fix=_FIX_FILE
        ) from error
    except RecursionError as error:
        rule = "is nested too deeply"
        raise PlanError(
            where=where, field="file", value=Path(where).name, rule=rule, fix=_FIX_FILE
        ) from error


class _JsonError(ValueError):
    """JSON that Python's parser accepts and we do not."""


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _JsonError(f"key {twice!r} appears twice in one object")
    return found


def _no_constant(name: str) -> NoReturn:
    raise _JsonError(f"{name} is not a JSON number")


def _require_plan(document: object, where: str) -> dict[str, Any]:
    """Return the document if it says that it is a plan of the version that we read, else raise."""
    place = _Place(where, "")
    if not isinstance(document, dict):
        place.refuse(document, "must be a JSON object")
    if document.get("kind") != KIND:
        place.key("kind").refuse(document.get("kind"), f"must be {KIND!r}")
    version = document.get("schema_version")
    if isinstance(version, bool) or version != SCHEMA_VERSION:
        raise PlanError(
            where=where,
            field="schema_version",
            value=_short(version),
            rule=f"is not supported; this Piper reads version {SCHEMA_VERSION}",
            fix="compile the plan again with this version of Piper",
        )
    return document


def _encode(value: Any) -> Any:
    """Turn dataclasses, arrays and tuples into plain JSON values; objects of users get sorted keys."""
    if isinstance(value, IndexLists):
        return {"counts": np.diff(value.starts).tolist(), "values": value.values.tolist()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        hints = _hints(type(value))
        return {
            item.name: _encode_float(getattr(value, item.name))
            if _mentions_float(hints[item.name])
            else _encode(getattr(value, item.name))
            for item in fields(value)
        }
    if isinstance(value, tuple | list):
        return list(value) if _flat(value) else [_encode(item) for item in value]
    if isinstance(value, dict):
        return {key: _encode(value[key]) for key in sorted(value)}
    return value


def _flat(values: tuple[Any, ...] | list[Any]) -> bool:
    return set(map(type, values)) <= {int, str, bool}


def _mentions_float(hint: Any) -> bool:
    return hint is float or float in typing.get_args(hint)


def _encode_float(value: float | None) -> float | None:
    return None if value is None else float(value)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


_Decoder = Callable[[Any, _Place], Any]


@cache
def _decoder(hint: Any) -> _Decoder:
    """Return the function that reads a value of type `hint`, once per type."""
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is np.ndarray:
        read = _column_decoder(typing.get_args(args[1])[0])
    elif origin is types.UnionType:
        read = _optional_decoder(next(arg for arg in args if arg is not types.NoneType))
    elif origin is tuple:
        read = _list_decoder(args[0]) if args[-1] is Ellipsis else _fixed_decoder(args)
    elif origin is dict:
        read = _read_object
    else:
        read = _enum_decoder(hint) if issubclass(hint, StrEnum) else _dataclass_decoder(hint)
    return read


def _dataclass_decoder(cls: type) -> _Decoder:
    decoders = {item.name: _decoder(_hints(cls)[item.name]) for item in fields(cls)}

    def read(value: Any, place: _Place) -> Any:
        _require_keys(value, tuple(decoders), place)
        found = {name: decode(value[name], place.key(name)) for name, decode in decoders.items()}
        try:
            return cls(**found)
        except InputError as error:
            place.refuse(error.value, f"{error.rule} ({error.field})")

    return read


def _require_keys(value: Any, names: tuple[str, ...], place: _Place) -> None:
    if not isinstance(value, dict):
        place.refuse(value, "must be a JSON object")
    for name in names:
        if name not in value:
            place.key(name).refuse(None, "is missing")
    for name in value:
        if name not in names:
            place.key(name).refuse(value[name], f"is an unknown key (known: {', '.join(names)})")


def _column_decoder(scalar: type) -> _Decoder:
    plain = bool if scalar is np.bool_ else int
    what = "a list of true and false" if plain is bool else "a list of whole numbers"

    def read(value: Any, place: _Place) -> Any:
        if not isinstance(value, list):
            place.refuse(value, f"must be {what}")
        if not set(map(type, value)) <= {plain}:
            index = next(i for i, item in enumerate(value) if type(item) is not plain)
            place.item(index).refuse(value[index], f"does not belong in {what}")
        try:
            return np.array(value, dtype=scalar)
        except OverflowError:
            info = np.iinfo(scalar)
            index = next(i for i, item in enumerate(value) if not info.min <= item <= info.max)
            place.item(index).refuse(value[index], f"must fit into {info.bits} bits")

    return read


def _read_index_lists(value: Any, place: _Place) -> IndexLists:
    _require_keys(value, ("counts", "values"), place)
    read = _column_decoder(np.int64)
    counts, values = read(value["counts"], place.key("counts")), read(value["values"], place.key("values"))
    if (counts < 0).any() or counts.sum() != len(values):
        place.key("counts").refuse(
            int(counts.sum()), f"must be numbers >= 0 whose sum is the number of values ({len(values)})"
        )
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return IndexLists(starts=starts, values=values)


def _list_decoder(item_hint: Any) -> _Decoder:
    decode = _decoder(item_hint)

    def read(value: Any, place: _Place) -> Any:
        if not isinstance(value, list):
            place.refuse(value, "must be a list")
        if item_hint in {int, str} and set(map(type, value)) <= {item_hint}:
            return tuple(value)
        return tuple(decode(item, place.item(index)) for index, item in enumerate(value))

    return read


def _fixed_decoder(item_hints: tuple[Any, ...]) -> _Decoder:
    decoders = [_decoder(hint) for hint in item_hints]

    def read(value: Any, place: _Place) -> Any:
        if not isinstance(value, list) or len(value) != len(decoders):
            place.refuse(value, f"must be a list of {len(decoders)}")
        pairs = zip(decoders, value, strict=True)
        return tuple(decode(item, place.item(index)) for index, (decode, item) in enumerate(pairs))

    return read


def _optional_decoder(hint: Any) -> _Decoder:
    decode = _decoder(hint)
    return lambda value, place: None if value is None else decode(value, place)


def _enum_decoder(enum: type[StrEnum]) -> _Decoder:
    known = {member.value: member for member in enum}

    def read(value: Any, place: _Place) -> Any:
        if not isinstance(value, str) or value not in known:
            place.refuse(value, f"must be one of {', '.join(known)}")
        return known[value]

    return read


def _read_object(value: Any, place: _Place) -> dict[str, Any]:
    if not isinstance(value, dict):
        place.refuse(value, "must be a JSON object")
    return value


def _read_int(value: Any, place: _Place) -> int:
    if type(value) is not int:
        place.refuse(value, "must be a whole number")
    return value


def _read_float(value: Any, place: _Place) -> float:
    if type(value) not in {int, float} or not math.isfinite(value):
        place.refuse(value, "must be a finite number")
    return float(value)


def _read_str(value: Any, place: _Place) -> str:
    if type(value) is not str:
        place.refuse(value, "must be text")
    return value


def _read_bool(value: Any, place: _Place) -> bool:
    if type(value) is not bool:
        place.refuse(value, "must be true or false")
    return value


_SIMPLE: dict[Any, _Decoder] = {
    int: _read_int,
    float: _read_float,
    str: _read_str,
    bool: _read_bool,
    IndexLists: _read_index_lists,
}


def _short(value: object) -> str | int | bool | None:
    if value is None or isinstance(value, int):
        return value
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."

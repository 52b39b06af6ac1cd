"""`--space FILE`: which strategies a search may take, as a YAML file.

[Note: space files]
    schema_version: 1
    values:                            # tried instead of ours: a list, or a range of whole numbers
      tp: [1, 2, 4]
      micro_batch: {from: 1, to: 8}
      gpus: [32, 64]                   # several: one search over all of them
    pin: {pp: 4}                       # the only value allowed
    forbid: {recompute: [full], schedule: [gpipe]}
    reserve: 4GiB                      # of every device, to leave free
    runnable: true                     # only what `piper run` executes

All keys but schema_version may be left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from cost_models.errors import LARGEST_COUNT, whole_number
from cost_models.units import Dimension, parse_quantity
from cost_models.yaml_file import Section, read_yaml
from piper.errors import JobError
from piper.search.choices import TEXTS, require_values

_KEYS = ("schema_version", "values", "pin", "forbid", "reserve", "runnable")
_VERSION = 1
_MOST_VALUES = 4096
"""Values of a range, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceFile:
    """What a space file says; see [Note: space files].

    Args:
        values: dimension -> values to try.
        pin: dimension -> the only value.
        forbid: (dimension, value) pairs.
        reserve_bytes: of every device.
        only_runnable: whether only what `piper run` executes may win.
    """

    values: Mapping[str, tuple[int | str, ...]]
    pin: Mapping[str, str]
    forbid: tuple[tuple[str, str], ...]
    reserve_bytes: int
    only_runnable: bool


def read_space_file(path: str) -> SpaceFile:
    """Read a space file.

    Raises: JobError, CostModelError for what cannot be read, an unknown key, dimension or value.
    """
    content = read_yaml(Path(path))
    if "schema_version" in content and content["schema_version"] != _VERSION:
        _fail(path, "schema_version", content["schema_version"], rule=f"must be {_VERSION}")
    file = Section(content, where=path, keys=_KEYS, sourced=False)
    file.integer("schema_version")
    listed = {name: file.mapping(name) if name in file else {} for name in ("values", "pin", "forbid")}
    values = {name: _values(path, name, value) for name, value in listed["values"].items()}
    pin = {name: _text(path, f"pin.{name}", value) for name, value in listed["pin"].items()}
    forbid = tuple(
        (name, _text(path, f"forbid.{name}", value))
        for name, given in listed["forbid"].items()
        for value in (given if isinstance(given, list) else [given])
    )
    pairs = [(name, str(value)) for name, several in values.items() for value in several]
    require_values([*pairs, *pin.items(), *forbid], where=path)
    reserve = content.get("reserve", 0)
    return SpaceFile(
        values=values,
        pin=pin,
        forbid=forbid,
        reserve_bytes=round(
            parse_quantity(reserve, Dimension.BYTES, where=path, field="reserve", zero_ok=True)
        ),
        only_runnable="runnable" in file and file.flag("runnable"),
    )


def _values(path: str, name: str, given: Any) -> tuple[int | str, ...]:
    """Return the values of a dimension: a list, one value, or {from, to}."""
    where = f"values.{name}"
    if isinstance(given, Mapping):
        return _range(path, where, given)
    texts = [_text(path, where, value) for value in (given if isinstance(given, list) else [given])]
    if not texts:
        _fail(path, where, given, rule="must have a value")
    if name in TEXTS:
        return tuple(texts)
    return tuple(text if (number := whole_number(text)) is None else number for text in texts)


def _range(path: str, where: str, given: Mapping[str, Any]) -> tuple[int, ...]:
    ends = [whole_number(str(given.get(key))) for key in ("from", "to")]
    low, high = ends
    if set(given) != {"from", "to"} or low is None or high is None or not low <= high <= LARGEST_COUNT:
        _fail(path, where, dict(given), rule="must be a list, or {from: 1, to: 8} with whole numbers")
    if high - low >= _MOST_VALUES:
        _fail(path, where, dict(given), rule=f"has more than {_MOST_VALUES} values")
    return tuple(range(low, high + 1))


def _text(path: str, where: str, value: object) -> str:
    """Return a value as a user writes it; YAML reads on and off as flags."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if not isinstance(value, int | str):
        _fail(path, where, value, rule="must be a whole number or a text")
    return str(value)


def _fail(path: str, field: str, value: object, *, rule: str) -> NoReturn:
    raise JobError(
        where=path, field=field, value=value, rule=rule,
        fix="write for example values: {tp: [1, 2], micro_batch: {from: 1, to: 4}}; docs/search.md",
    )  # fmt: skip

"""Read catalogue files: YAML into sections whose fields are checked by name, unit, range and source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from cost_models.documents import UnreadableError, parse_yaml, read_text
from cost_models.errors import CostModelError, as_float, nearest, require_positive_int, whole_number
from cost_models.units import Dimension, parse_quantity

SCHEMA_VERSION = 1


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in the YAML file at `path`.

    Raises: CostModelError for a missing or unreadable file, broken YAML (with line and column), a file that
        is not a mapping.
    """
    where = str(path)
    try:
        content = parse_yaml(read_text(path))
    except UnreadableError as problem:
        fix = (
            "give the path of a YAML file or a catalogue name"
            if problem.missing
            else "give a text file in YAML: check indentation, colons and quotes"
        )
        raise _error(problem.place(where), "file", where, rule=problem.rule, fix=fix) from None
    if not isinstance(content, dict):
        fix = "write `key: value` lines"
        raise _error(where, "file", type(content).__name__, rule="must be a mapping", fix=fix)
    return content


class Section:
    """One mapping of a file. Every getter checks its field and names it in errors.

    Args:
        data: the mapping (any value: others are refused).
        where: file, for errors.
        path: dotted name of the section, "" for the whole file.
        keys: all keys it may have.
        sourced: whether it holds figures, hence must have `source`.
    """

    def __init__(
        self, data: Any, *, where: str, path: str = "", keys: Sequence[str], sourced: bool = True
    ) -> None:
        self.where = where
        self.path = path
        if not isinstance(data, Mapping):
            raise _error(where, path, data, rule="must be a mapping", fix=f"write keys: {', '.join(keys)}")
        self._data = data
        known = (*keys, "source") if sourced else tuple(keys)
        for key in data:
            if key not in known:
                raise _error(
                    where, self._name(str(key)), key, rule="is not known", fix=nearest(str(key), known)
                )
        if sourced:
            self.source = self.text("source")

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def names(self) -> Iterator[str]:
        """Yield all keys but `source`, in file order."""
        return (key for key in self._data if key != "source")

    def section(self, key: str, keys: Sequence[str], *, sourced: bool = True) -> Section:
        """Return the section `key`, which may have `keys`."""
        value = self._required(key)
        return Section(value, where=self.where, path=self._name(key), keys=keys, sourced=sourced)

    def mapping(self, key: str) -> dict[str, Any]:
        """Return the mapping `key` as plain data, unread: text, finite numbers, flags, lists, mappings."""
        value = self._required(key)
        if not isinstance(value, dict):
            self._fail(key, value, rule="must be a mapping", fix="write `key: value` lines under it")
        self._require_plain(key, value)
        return value

    def _require_plain(self, key: str, value: object) -> None:
        if isinstance(value, Mapping):
            for name, entry in value.items():
                self._require_plain(f"{key}.{name}", entry)
        elif isinstance(value, list):
            for entry in value:
                self._require_plain(key, entry)
        elif not (value is None or isinstance(value, str | bool) or math.isfinite(as_float(value))):
            self._fail(key, value, rule="must be a text or a finite number", fix="quote it if it is a text")

    def is_text(self, key: str) -> bool:
        """Return whether `key` is there and a text, where a field may be a text or a section."""
        return isinstance(self._data.get(key), str)

    def numbered(self, key: str, prefix: str) -> tuple[int, ...]:
        """Return the numbers n, rising, for which the section `key` has a key `prefix` + n; no other keys."""
        names = self.mapping(key)
        found = {str(name): whole_number(str(name).removeprefix(prefix)) for name in names}
        for name, number in found.items():
            if number is None or name != f"{prefix}{number}":
                fix = f"write keys such as {prefix}4"
                self._fail(key, name, rule="is not known", fix=fix)
        return tuple(sorted(number for number in found.values() if number is not None))

    def text(self, key: str) -> str:
        """Return a text that is not empty."""
        value = self._required(key)
        if not isinstance(value, str) or not value.strip():
            fix = "say where the figures come from" if key == "source" else "write a text"
            self._fail(key, value, rule="must be a text", fix=fix)
        return value

    def flag(self, key: str) -> bool:
        """Return true or false."""
        value = self._required(key)
        if not isinstance(value, bool):
            self._fail(key, value, rule="must be true or false", fix="write true or false")
        return value

    def integer(self, key: str) -> int:
        """Return a whole number >= 1."""
        value = self._required(key)
        name = self._name(key)
        fix = "write a whole number such as 8"
        return require_positive_int(value, where=self.where, field=name, fix=fix, error=CostModelError)

    def quantity(self, key: str, dimension: Dimension, *, zero_ok: bool = False) -> float:
        """Return a quantity in base units."""
        value = self._required(key)
        name = self._name(key)
        return parse_quantity(value, dimension, where=self.where, field=name, zero_ok=zero_ok)

    def size(self, key: str, *, zero_ok: bool = False) -> int:
        """Return a size in whole bytes."""
        return round(self.quantity(key, Dimension.BYTES, zero_ok=zero_ok))

    def seconds(self, key: str, *, zero_ok: bool = False) -> float:
        """Return a time in seconds."""
        return self.quantity(key, Dimension.SECONDS, zero_ok=zero_ok)

    def rate(self, key: str) -> float:
        """Return a bandwidth in bytes per second."""
        return self.quantity(key, Dimension.BYTES_PER_S)

    def number(self, key: str, *, up_to: float = math.inf, zero_ok: bool = False) -> float:
        """Return a plain number > 0 (or 0, with `zero_ok`) and <= `up_to`."""
        return self._number(key, self._required(key), up_to=up_to, zero_ok=zero_ok)

    def numbers(self, key: str, *, up_to: float = math.inf) -> tuple[float, ...]:
        """Return a list of plain numbers > 0 and <= `up_to`."""
        return tuple(self._number(key, value, up_to=up_to, zero_ok=False) for value in self._list(key))

    def error(self, key: str = "error") -> float:
        """Return a fraction below 1 ([Note: error of a figure])."""
        value = self.number(key)
        if not value < 1:
            self._fail(key, value, rule="must be below 1", fix="write a fraction: 0.2 is 20 %")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts, possibly empty."""
        values = self._list(key)
        for value in values:
            if not isinstance(value, str):
                self._fail(key, value, rule="must be a list of texts", fix="write [bf16, fp16]")
        return tuple(values)

    def rising_seconds(self, key: str) -> tuple[float, float]:
        """Return a list of two times, the second not below the first."""
        name = self._name(key)
        times = [
            parse_quantity(value, Dimension.SECONDS, where=self.where, field=name, zero_ok=True)
            for value in self._list(key)
        ]
        if len(times) != 2 or times[0] > times[1]:  # noqa: PLR2004 (a pair)
            self._fail(key, self._data[key], rule="must be two rising times", fix="write [11us, 33us]")
        return times[0], times[1]

    def _list(self, key: str) -> list[Any]:
        value = self._required(key)
        if not isinstance(value, list):
            self._fail(key, value, rule="must be a list", fix="write [first, second]")
        return value

    def _number(self, key: str, value: object, *, up_to: float, zero_ok: bool) -> float:
        number = as_float(value)
        if not (number > 0 or (zero_ok and number == 0)) or not (number <= up_to and math.isfinite(number)):
            limit = "" if up_to == math.inf else f" and <= {up_to:g}"
            sign = ">=" if zero_ok else ">"
            self._fail(key, value, rule=f"must be a number {sign} 0{limit}", fix="write a plain number")
        return number

    def _required(self, key: str) -> Any:
        if key not in self._data:
            fix = "say where the figures come from" if key == "source" else "add the key"
            self._fail(key, None, rule="is missing", fix=fix)
        return self._data[key]

    def _name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def _fail(self, key: str, value: object, *, rule: str, fix: str) -> NoReturn:
        raise _error(self.where, self._name(key), value, rule=rule, fix=fix)


def _error(where: str, field: str, value: object, *, rule: str, fix: str) -> CostModelError:
    return CostModelError(where=where, field=field, value=value, rule=rule, fix=fix)

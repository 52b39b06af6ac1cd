"""Checked reading of a model's configuration: every refusal names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from cost_models.errors import as_float, nearest, require_positive, require_positive_int
from piper.errors import ModelError

PUBLISHED = "give what the published config.json has"

Meaning = TypeVar("Meaning")


def require(holds: bool, *, where: str, field: str, value: object, rule: str) -> None:
    """Raise ModelError naming `field` unless `holds`."""
    if not holds:
        fix = f"correct {field} in the config (compare with the published config.json)"
        raise ModelError(where=where, field=field, value=value, rule=rule, fix=fix)


class Fields:
    """Reads fields of one JSON object.

    A field that is missing or null takes its default; without one it is an error. Where null says something
    else than a missing key ("none of it", "as many as"), the reader says so: `null=`, `count_or_none`.

    Args:
        values: the object.
        where: the file or catalogue entry, for messages.
        prefix: the path of the object inside the file, with a dot at its end.

    `assumed` collects the fields that took their default, `notices` what the reader has to say, `seen` the
    names that were asked for.
    """

    def __init__(self, values: Mapping[str, Any], *, where: str, prefix: str = "") -> None:
        self._values = values
        self.where = where
        self._prefix = prefix
        self.assumed: list[str] = []
        self.notices: list[str] = []
        self.seen: set[str] = set()
        self._inner: dict[str, Fields] = {}

    def has(self, name: str) -> bool:
        """Tell whether the field is there and not null."""
        self.seen.add(name)
        return self._values.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Tell whether the field is there and null."""
        self.seen.add(name)
        return name in self._values and self._values[name] is None

    def count(self, name: str, *, default: int | None = None, null: int | None = None) -> int:
        """Return a whole number >= 1."""
        value = self._get(name, default, null=null)
        return require_positive_int(
            value, where=self.where, field=self._prefix + name,
            fix="give a whole number such as the published config.json has", error=ModelError,
        )  # fmt: skip

    def count_or_none(self, name: str, *, default: int | None = None) -> int | None:
        """Return a whole number >= 1, or None where the field is null; a missing one takes `default`."""
        if self.is_null(name):
            return None
        if name not in self._values and default is None:
            self.assumed.append(f"{self._prefix}{name} = null")
            return None
        return self.count(name, default=default)

    def count_or_zero(self, name: str, *, default: int) -> int:
        """Return a whole number >= 0."""
        value = self._get(name, default)
        if value == 0 and not isinstance(value, bool):
            return 0
        return self.count(name, default=default)

    def number(self, name: str, *, default: float | None = None) -> float:
        """Return a finite number > 0."""
        value = self._get(name, default)
        return require_positive(
            value, where=self.where, field=self._prefix + name,
            fix="give a number such as the published config.json has", error=ModelError,
        )  # fmt: skip

    def number_or_none(self, name: str, *, default: float | None = None) -> float | None:
        """Return a number > 0, or None where the field is null; a missing one takes `default`."""
        if self.is_null(name):
            return None
        if name not in self._values and default is None:
            self.assumed.append(f"{self._prefix}{name} = null")
            return None
        return self.number(name, default=default)

    def share(self, name: str, *, default: float) -> float:
        """Return a number in [0, 1) (a dropout probability)."""
        value = self._get(name, default)
        number = as_float(value)
        if not 0 <= number < 1:
            raise self.error(name, value, rule="must be a number in [0, 1)", fix="use 0.0 for no dropout")
        return number

    def flag(self, name: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, rule="must be true or false", fix="write true or false, unquoted")
        return value

    def choice(self, name: str, meanings: Mapping[str, Meaning], *, default: str | None = None) -> Meaning:
        """Return what the field's text means; other texts are refused with the nearest known ones."""
        value = self._get(name, default)
        if not isinstance(value, str) or value not in meanings:
            known = (
                f"must be one of {', '.join(meanings)}"
                if len(meanings) > 1
                else f"must be {next(iter(meanings))}"
            )
            raise self.error(name, value, rule=known, fix=nearest(str(value), meanings))
        return meanings[value]

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of numbers > 0."""
        value = self._get(name, None)
        if not isinstance(value, list) or not all(as_float(entry) > 0 for entry in value):
            raise self.error(name, value, rule="must be a list of numbers > 0", fix=PUBLISHED)
        return tuple(float(entry) for entry in value)

    def whole_numbers(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers >= 0; missing or null: none."""
        self.seen.add(name)
        value = self._values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(entry) is int and entry >= 0 for entry in value):
            raise self.error(name, value, rule="must be a list of whole numbers >= 0", fix=PUBLISHED)
        return tuple(value)

    def texts(self, name: str, known: Sequence[str], *, length: int) -> tuple[str, ...] | None:
        """Return a list of `length` texts, each one of `known`; None when missing or null."""
        self.seen.add(name)
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.error(name, value, rule="must be a list", fix=PUBLISHED)
        for entry in value:
            if entry not in known:
                raise self.error(name, entry, rule="is not supported", fix=f"supported: {', '.join(known)}")
        if len(value) != length:
            raise self.error(
                name, f"{len(value)} entries", rule=f"must have one entry for each of {length} layers",
                fix="give one entry per layer, or leave it out for the family's own pattern",
            )  # fmt: skip
        return tuple(value)

    def inner(self, name: str) -> Fields | None:
        """Return the object under `name`; None when missing or null."""
        self.seen.add(name)
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, value, rule="must be an object or null", fix=PUBLISHED)
        found = self._inner.setdefault(name, Fields(value, where=self.where, prefix=f"{self._prefix}{name}."))
        found.assumed, found.notices = self.assumed, self.notices
        return found

    def raw(self, name: str) -> Any:
        """Return the field as it is; None when missing."""
        self.seen.add(name)
        return self._values.get(name)

    def require(self, holds: bool, name: str, *, value: object, rule: str, fix: str = "") -> None:
        """Raise ModelError about the field unless `holds`."""
        if not holds:
            fix = fix or f"correct {name} in the config (compare with the published config.json)"
            raise self.error(name, value, rule=rule, fix=fix)

    def refuse(self, name: str, *, unless: object = None) -> None:
        """Raise ModelError if the field asks for what is not there; null and `unless` do not ask for it."""
        value = self.raw(name)
        if value is not None and value != unless:
            off = "null" if unless is None else str(unless).lower()
            raise self.error(name, value, rule="is not supported", fix=f"leave it out, or set it to {off}")

    def error(self, name: str, value: object, *, rule: str, fix: str) -> ModelError:
        """Return the error about a field."""
        return ModelError(where=self.where, field=self._prefix + name, value=value, rule=rule, fix=fix)

    def unread(self) -> list[str]:
        """Return the names that were never asked for, in order, those of objects inside too."""
        own = [self._prefix + name for name in self._values if name not in self.seen]
        return own + [name for inner in self._inner.values() for name in inner.unread()]

    def _get(self, name: str, default: Any, *, null: Any = None) -> Any:
        self.seen.add(name)
        value = self._values.get(name)
        if value is not None:
            return value
        if null is not None and name in self._values:
            default = null
        if default is None:
            rule = "is missing" if name not in self._values else "must not be null"
            raise self.error(name, value, rule=rule, fix=f"add {self._prefix + name!r} to the config")
        note = f"{self._prefix}{name} = {default}"
        if note not in self.assumed:
            self.assumed.append(note)
        return default

"""Checked reading of a model's configuration: every refusal names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cost_models.errors import as_float, require_positive, require_positive_int
from piper.errors import ModelError


def require(holds: bool, *, where: str, field: str, value: object, rule: str) -> None:
    """Raise ModelError naming `field` unless `holds`."""
    if not holds:
        fix = f"correct {field} in the config (compare with the published config.json)"
        raise ModelError(where=where, field=field, value=value, rule=rule, fix=fix)


class Fields:
    """Reads fields of one JSON object; `assumed` collects those that took their default.

    A field that is missing or null takes its default; without one it is an error.
    """

    def __init__(self, values: Mapping[str, Any], *, where: str, prefix: str = "") -> None:
        self._values = values
        self._where = where
        self._prefix = prefix
        self.assumed: list[str] = []

    def count(self, name: str, *, default: int | None = None) -> int:
        """Return a whole number >= 1."""
        value = self._get(name, default)
        return require_positive_int(
            value,
            where=self._where,
            field=self._prefix + name,
            fix="give a whole number such as the published config.json has",
            error=ModelError,
        )

    def number(self, name: str, *, default: float | None = None) -> float:
        """Return a finite number > 0."""
        value = self._get(name, default)
        return require_positive(
            value,
            where=self._where,
            field=self._prefix + name,
            fix="give a number such as the published config.json has",
            error=ModelError,
        )

    def share(self, name: str, *, default: float) -> float:
        """Return a number in [0, 1) (a dropout probability)."""
        value = self._get(name, default)
        number = as_float(value)
        if not 0 <= number < 1:
            raise self._error(name, value, rule="must be a number in [0, 1)", fix="use 0.0 for no dropout")
        return number

    def flag(self, name: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._error(name, value, rule="must be true or false", fix="write true or false, unquoted")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is None:
            rule = "is missing" if name not in self._values else "must not be null"
            raise self._error(name, value, rule=rule, fix=f"add {self._prefix + name!r} to the config")
        self.assumed.append(f"{self._prefix}{name} = {default}")
        return default

    def _error(self, name: str, value: object, *, rule: str, fix: str) -> ModelError:
        return ModelError(where=self._where, field=self._prefix + name, value=value, rule=rule, fix=fix)

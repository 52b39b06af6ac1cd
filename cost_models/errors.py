"""Errors of all three packages: what was given, where, why it is refused, and how to mend it.

    PiperError
    ├── InputError         the user's input: where, field, value, rule, fix   (exit 2)
    │   └── CostModelError hardware, cluster, operation or measurement
    └── InternalError      our own fault: a broken invariant, asks for a report (exit 1)

`simulator.errors` and `piper.errors` subclass these, so one `except InputError` at the border serves all.
"""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Iterable, Sequence

LARGEST_COUNT = 2**40
"""No count of anything is larger; without a limit, a slip of the keyboard fills the memory or overflows."""

_MOST_DIGITS = 4000
"""Python refuses to convert more."""

_LONGEST_SHOWN = 300


class PiperError(Exception):
    """Anything that Piper raises on purpose; it survives the way from one process to another."""

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[PiperError], args: tuple[object, ...], state: dict[str, object]) -> PiperError:
    """Return an error as it was raised, without the keyword arguments that it was made from."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class InputError(PiperError):
    """Input that cannot be used, said so that the reader can mend it at once."""

    code = "bad_input"
    exit_code = 2

    def __init__(self, *, where: str, field: str, value: object, rule: str, fix: str) -> None:
        self.where = where
        self.field = field
        self.value = value
        self.rule = rule
        self.fix = fix
        super().__init__(f"{where}: {field} = {_SHORT.repr(value)} {rule}\nfix: {fix}")

    def message(self) -> str:
        """Return the line after `error: ` (CONTRACT: WHERE: FIELD = VALUE RULE)."""
        return f"{_shown(self.where)}: {self.field} = {_shown(self.value)} {self.rule}"

    def to_json(self) -> dict[str, object]:
        """Return the object under `error` of the `--json` output."""
        return {
            "code": self.code,
            "where": self.where,
            "field": self.field,
            "value": self.value if isinstance(self.value, str | int | bool) else _shown(self.value),
            "rule": self.rule,
            "fix": self.fix,
        }


class CostModelError(InputError):
    """A hardware figure, cluster, operation or measurement that cannot be priced."""


class InternalError(PiperError):
    """A broken invariant of ours."""

    exit_code = 1


def check_invariant(cond: bool, what: str) -> None:
    """Raise `InternalError` unless `cond` holds; for what no user input may break."""
    if not cond:
        raise InternalError(f"internal error: {what}. This is a bug in Piper: please report it.")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a did-you-mean sentence for an unknown `name`, listing all names when none is near."""
    names = list(known)
    lowered = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.lower(), list(lowered), n=3, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(repr(lowered[c]) for c in close) + "?"
    return "known: " + ", ".join(names)


def require_known(
    name: str, known: Sequence[str], *, where: str, field: str, error: type[InputError] = InputError
) -> None:
    """Raise unless `name` is one of `known`, with a did-you-mean."""
    if name not in known:
        raise error(where=where, field=field, value=name, rule="is not known", fix=nearest(name, known))


def require_positive_int(
    value: object, *, where: str, field: str, fix: str, error: type[InputError] = InputError
) -> int:
    """Return `value` if it is a whole number from 1 to `LARGEST_COUNT`, else raise.

    Booleans, NaN and text are refused.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        rule = "must be a whole number >= 1"
        raise error(where=where, field=field, value=value, rule=rule, fix=fix)
    if value > LARGEST_COUNT:
        rule = f"must be at most 2^40 = {LARGEST_COUNT}"
        raise error(where=where, field=field, value=value, rule=rule, fix=fix)
    return value


def whole_number(text: str) -> int | None:
    """Return the number that ASCII digits spell, None for any other text (signs, points, too many digits)."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def require_positive(
    value: object, *, where: str, field: str, fix: str, error: type[InputError] = InputError
) -> float:
    """Return `value` as a float if it is a finite number > 0, else raise (NaN is refused too)."""
    number = as_float(value)
    if not (number > 0 and math.isfinite(number)):
        raise error(where=where, field=field, value=value, rule="must be a number > 0", fix=fix)
    return number


def as_float(value: object) -> float:
    """Return a number as a float; NaN for what is none (booleans and text too) or too large for one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _shown(value: object) -> str:
    """Return a value for one line of a terminal: no control characters, of bounded length."""
    if isinstance(value, str) and value.isprintable() and len(value) <= _LONGEST_SHOWN:
        return value
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
"""Cuts what is deep or long: a few lines of YAML can stand for more text than there is memory."""
_SHORT.maxlevel = 4
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = _SHORT.maxfrozenset = 20
_SHORT.maxstring = _SHORT.maxother = _LONGEST_SHOWN
_SHORT.maxlong = 60

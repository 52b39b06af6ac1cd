"""The shorthand: `tp=2,pp=4,dp=8,schedule=1f1b` <-> typed fields."""

from __future__ import annotations

from dataclasses import dataclass, fields

from cost_models.errors import LARGEST_COUNT, nearest, whole_number
from piper.errors import StrategyError
from piper.strategy.cuts import is_cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Shorthand:
    """What a shorthand states; None: not stated. The order of the fields is the canonical order."""

    tp: int | None = None
    pp: int | None = None
    vp: int | None = None
    cp: int | None = None
    ep: int | None = None
    etp: int | None = None
    dp: int | None = None
    hsdp: int | None = None
    zero: int | None = None
    sp: str | None = None
    schedule: str | None = None
    recompute: str | None = None
    micro_batch: int | None = None
    async_tp: str | None = None
    offload: str | None = None
    bucket_mb: int | None = None
    prefetch: int | None = None
    cut: str | None = None

    def __str__(self) -> str:
        """Return the canonical text; `parse` is its inverse."""
        stated = ((f.name, getattr(self, f.name)) for f in fields(self))
        return ",".join(f"{name}={value}" for name, value in stated if value is not None)

    @property
    def degrees(self) -> dict[str, int]:
        """Return the stated degrees that multiply the GPUs."""
        named = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "dp": self.dp}
        return {name: value for name, value in named.items() if value is not None}


KEYS = tuple(f.name for f in fields(Shorthand))
_TEXT = {
    "sp": ("on", "off"),
    "async_tp": ("on", "off"),
    "offload": ("none", "optimizer", "activations", "params"),
}
_ZERO_STAGES = range(4)


def parse_shorthand(text: str, *, where: str = "--strategy") -> Shorthand:
    """Read a shorthand; raises StrategyError that names the key.

    >>> str(parse_shorthand("dp=8,pp=4,schedule=1f1b"))
    'pp=4,dp=8,schedule=1f1b'
    """
    stated: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value or not key:
            raise StrategyError(
                where=where, field="strategy", value=part.strip() or text, rule="is not key=value",
                fix="write for example pp=4,dp=16,zero=1,schedule=1f1b, or give a file",
            )  # fmt: skip
        if key not in KEYS:
            raise StrategyError(
                where=where, field=key, value=value, rule="is not a key", fix=nearest(key, KEYS)
            )
        if key in stated:
            raise StrategyError(
                where=where,
                field=key,
                value=f"{stated[key]} and {value}",
                rule="is given twice",
                fix="keep one",
            )
        stated[key] = value
    return Shorthand(**{key: read_value(key, value, where=where) for key, value in stated.items()})  # type: ignore[arg-type]


def read_value(key: str, text: str, *, where: str) -> int | str:
    """Read the value of one key; raises StrategyError that names the key."""
    if key == "schedule":
        return text
    if key in _TEXT:
        if text not in _TEXT[key]:
            rule = f"must be one of {', '.join(_TEXT[key])}"
            raise StrategyError(where=where, field=key, value=text, rule=rule, fix=nearest(text, _TEXT[key]))
        return text
    if key == "recompute":
        return _recompute(text, where=where)
    if key == "cut":
        return _cut(text, where=where)
    least = 0 if key in {"zero", "prefetch"} else 1
    number = whole_number(text)
    if number is None or not least <= number <= LARGEST_COUNT:
        too_large = number is not None and number > LARGEST_COUNT
        raise StrategyError(
            where=where, field=key, value=text,
            rule=f"must be at most {LARGEST_COUNT}" if too_large else f"must be a whole number >= {least}",
            fix=f"write for example {key}={max(1, least)}",
        )  # fmt: skip
    if key == "zero" and number not in _ZERO_STAGES:
        raise StrategyError(
            where=where, field=key, value=text, rule="must be 0, 1, 2 or 3", fix="write zero=1"
        )
    return number


def _cut(text: str, *, where: str) -> str:
    if is_cut(text):
        return text
    raise StrategyError(
        where=where, field="cut", value=text, rule="must be even, balanced, or the units of every stage",
        fix="write cut=balanced, or for example cut=9+10+10+8",
    )  # fmt: skip


def _recompute(text: str, *, where: str) -> str:
    layers = whole_number(text.removeprefix("full:"))
    if text in {"none", "selective", "ops", "full"} or (
        text.startswith("full:") and layers is not None and layers > 0
    ):
        return text
    raise StrategyError(
        where=where, field="recompute", value=text, rule="must be none, selective, ops, full or full:N",
        fix="write recompute=full",
    )  # fmt: skip

"""Costs of passes for a schedule without a model: any one unit, kept exact as fractions."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from cost_models.errors import nearest
from piper.errors import StrategyError

Costs = Mapping[str, Fraction]
"""By name: F, BI, BW, B (= BI + BW), FB (a slot in which an F and a B overlap), comm; and `kept`, no time."""

_FIX = "write for example F=1,BI=1,BW=1,comm=0"
_NAMES = ("F", "BI", "BW", "B", "FB", "comm", "kept")
NOT_TIMES = frozenset({"kept"})
"""What is given beside the costs, and takes no time."""
_MAY_BE_ZERO = frozenset({"comm", "kept"})
_LONGEST_EXPONENT = 3


def parse_costs(text: str = "", *, where: str = "--costs") -> Costs:
    """Read `F=1,BI=1,BW=1,FB=F+BI+BW,comm=0`; what is left out has these values.

    `B=1` in place of BI and BW gives each of them half.
    Numbers are whole, decimal ("0.1") or fractions ("1/3"), all exact. `comm` is the latency of every edge
    between ranks; it does not occupy the compute stream. `kept` (0 to 1, default 1) is the share of a
    microbatch's memory that is held from the end of BI to the end of BW: `zb_1p` and `zb_2p` weigh it.
    Raises: StrategyError for an unknown or repeated name, and for what is no number > 0 (comm: >= 0).
    """
    found: dict[str, Fraction] = {}
    for part in (part.strip() for part in text.split(",") if part.strip()):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in _NAMES:
            raise StrategyError(
                where=where, field="cost", value=name, rule="is not known", fix=nearest(name, _NAMES)
            )
        if not equals or name in found:
            rule = "is given twice" if name in found else "has no value"
            raise StrategyError(where=where, field="cost", value=name, rule=rule, fix=_FIX)
        found[name] = _number(name, value, found, where=where)
    if "B" in found:
        halves = {"BI": found["B"] / 2, "BW": found["B"] / 2}
        if found.keys() & halves.keys():
            raise StrategyError(
                where=where, field="B", value=str(found["B"]), rule="is BI + BW, which is given too",
                fix="give either B, or BI and BW",
            )  # fmt: skip
        found |= halves
    costs = {"F": Fraction(1), "BI": Fraction(1), "BW": Fraction(1), "comm": Fraction(0)} | found
    costs["B"] = costs["BI"] + costs["BW"]
    costs.setdefault("FB", costs["F"] + costs["B"])
    return costs


def _number(name: str, text: str, known: Mapping[str, Fraction], *, where: str) -> Fraction:
    """Return a number; FB may also be a sum of names and numbers."""
    try:
        terms = text.split("+") if name == "FB" else [text]
        value = sum((_term(term.strip(), known) for term in terms), Fraction(0))
    except (ValueError, ZeroDivisionError) as error:
        rule = "must be a number"
        raise StrategyError(where=where, field=name, value=text, rule=rule, fix=_FIX) from error
    if value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
        rule = "must be >= 0" if name in _MAY_BE_ZERO else "must be > 0"
        raise StrategyError(where=where, field=name, value=text, rule=rule, fix=_FIX)
    if name == "kept" and value > 1:
        rule = "must be at most 1: it is a share of a microbatch's memory"
        raise StrategyError(where=where, field=name, value=text, rule=rule, fix="write for example kept=0.4")
    return value


def _term(text: str, known: Mapping[str, Fraction]) -> Fraction:
    if text in {"F", "BI", "BW"}:
        return known.get(text, Fraction(1))
    if text == "B" and "B" in known:
        return known["B"]
    if text == "B":
        return known.get("BI", Fraction(1)) + known.get("BW", Fraction(1))
    if len(text.lower().partition("e")[2]) > _LONGEST_EXPONENT:
        raise ValueError(text)  # Fraction would write out all its digits
    return Fraction(text)

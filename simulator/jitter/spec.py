"""What is written after `--jitter`: text -> clauses, each with one error that says how to mend it.

    straggler:rank=17,factor=1.3      slow-node:node=2,factor=1.2      link:node=3,factor=0.5
    noise:sigma=0.05,on=compute       hiccup:probability=0.001,ms=5

Several are separated by `;`. A rank or node is a number, or a range such as 16-23. `KINDS` is the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from typing import Any, ClassVar

from cost_models.errors import InputError, nearest, whole_number

Reader = Callable[[str], Any]

WHERE = "--jitter"
LARGEST_FACTOR = 1e6
LARGEST_SIGMA = 2.0
LARGEST_MS = 1e9
NS_PER_MS = 1_000_000


class On(StrEnum):
    """What noise is on; host copies count as communication."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    ALL = "all"


class Per(StrEnum):
    """Who draws together: the ranks of a tensor-parallel group, or every rank for itself."""

    GROUP = "group"
    RANK = "rank"


@dataclass(frozen=True, slots=True)
class Span:
    """Ranks or nodes from `first` to `last`, both included."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def _span(text: str) -> Span:
    first, _, last = text.partition("-")
    ends = whole_number(first), whole_number(last or first)
    if ends[0] is None or ends[1] is None or (text.endswith("-")) or ends[0] > ends[1]:
        raise ValueError("must be a whole number >= 0, or a range such as 16-23")
    return Span(ends[0], ends[1])


def _number(high: float, *, rule: str) -> Reader:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value <= high:
            raise ValueError(rule)
        return value

    return read


def _one_of(choices: type[StrEnum]) -> Reader:
    def read(text: str) -> StrEnum:
        if text not in list(choices):
            raise ValueError(f"must be one of {', '.join(choices)}")
        return choices(text)

    return read


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """All computation of a rank takes `factor` times as long."""

    kind: ClassVar[str] = "straggler"
    example: ClassVar[str] = "straggler:rank=17,factor=1.3"
    rank: Span
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowNode:
    """All computation of the ranks of a node takes `factor` times as long."""

    kind: ClassVar[str] = "slow-node"
    example: ClassVar[str] = "slow-node:node=2,factor=1.2"
    node: Span
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The network link of a rank, or of all ranks of a node, has `factor` of its bandwidth left.

    A transfer or collective over several nodes takes 1 / factor of its time when one of its members is
    such a rank: it is as fast as its slowest link.
    """

    kind: ClassVar[str] = "link"
    example: ClassVar[str] = "link:node=3,factor=0.5"
    rank: Span | None = None
    node: Span | None = None
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Every task takes a lognormal factor of mean 1, drawn anew for every step and task."""

    kind: ClassVar[str] = "noise"
    example: ClassVar[str] = "noise:sigma=0.05,on=compute"
    sigma: float
    on: On = On.COMPUTE
    per: Per = Per.GROUP


@dataclass(frozen=True, slots=True, kw_only=True)
class Hiccup:
    """With some probability, a computation takes `ms` milliseconds more: the system had other work."""

    kind: ClassVar[str] = "hiccup"
    example: ClassVar[str] = "hiccup:probability=0.001,ms=5"
    probability: float
    ms: float
    rank: Span | None = None
    node: Span | None = None
    per: Per = Per.GROUP


Clause = Straggler | SlowNode | Link | Noise | Hiccup

KINDS: dict[str, type[Clause]] = {kind.kind: kind for kind in (Straggler, Noise, Link, SlowNode, Hiccup)}


READERS: dict[str, Reader] = {
    "rank": _span,
    "node": _span,
    "factor": _number(LARGEST_FACTOR, rule="must be > 0 and at most 10^6: 1.3 takes 1.3 times as long"),
    "sigma": _number(LARGEST_SIGMA, rule="must be > 0 and at most 2: 0.05 is about 5 %"),
    "on": _one_of(On),
    "per": _one_of(Per),
    "probability": _number(1, rule="must be > 0 and at most 1, per computation"),
    "ms": _number(LARGEST_MS, rule="must be > 0 and at most 10^9 milliseconds"),
}
"""How the fields of clauses are read; each raises ValueError with its rule."""
LINK_READERS: dict[str, Reader] = READERS | {
    "factor": _number(1, rule="must be > 0 and at most 1: the share of the bandwidth that is left")
}


def written(clause: Clause) -> str:
    """Return the text of a clause; `parse_jitter` is the inverse."""
    given = [
        f"{entry.name}={_shown(getattr(clause, entry.name))}"
        for entry in fields(clause)
        if getattr(clause, entry.name) != entry.default
    ]
    return f"{clause.kind}:{','.join(given)}"


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def parse_jitter(texts: str | Sequence[str]) -> tuple[Clause, ...]:
    """Read what is written after `--jitter`, once or several times.

    Raises: InputError naming the clause, the field and the rule that it breaks.
    """
    listed = [texts] if isinstance(texts, str) else list(texts)
    pieces = [piece.strip() for text in listed for piece in str(text).split(";")]
    clauses = tuple(_clause(piece) for piece in pieces if piece)
    if listed and not clauses:
        raise _error("clause", "; ".join(listed), rule="says nothing", fix=f"write {Straggler.example}")
    _require_one_noise(clauses)
    return clauses


def _clause(text: str) -> Clause:
    name, _, rest = text.partition(":")
    if name.strip() not in KINDS:
        raise _error("kind", name.strip(), rule="is not known", fix=nearest(name.strip(), KINDS))
    kind = KINDS[name.strip()]
    known = LINK_READERS if kind is Link else READERS
    readers = {entry.name: known[entry.name] for entry in fields(kind)}
    values: dict[str, Any] = {}
    for pair in rest.split(",") if rest.strip() else []:
        key, _, value = (piece.strip() for piece in pair.partition("="))
        where = f"{kind.kind}.{key}"
        if key not in readers:
            raise _error(where, value, rule="is no field of it", fix=nearest(key, readers))
        if key in values:
            raise _error(where, value, rule="is given twice", fix="leave one of them out")
        try:
            values[key] = readers[key](value)
        except ValueError as problem:
            raise _error(where, value, rule=str(problem), fix=f"write for example {kind.example}") from None
    for entry in fields(kind):
        if entry.default is MISSING and entry.name not in values:
            rule = "must be given"
            raise _error(
                f"{kind.kind}.{entry.name}", text, rule=rule, fix=f"write for example {kind.example}"
            )
    _require_place(kind, values, text)
    return kind(**values)


def _require_place(kind: type[Clause], values: dict[str, Any], text: str) -> None:
    both = "rank" in values and "node" in values
    if both or (kind is Link and not ("rank" in values or "node" in values)):
        rule = "names a rank and a node" if both else "names neither a rank nor a node"
        raise _error(kind.kind, text, rule=rule, fix=f"write for example {kind.example}")


def _require_one_noise(clauses: Sequence[Clause]) -> None:
    """Refuse two kinds of noise on the same tasks: their product is noise of one larger sigma."""
    noises = [clause for clause in clauses if isinstance(clause, Noise)]
    for what in (On.COMPUTE, On.COMMUNICATION):
        found = [written(noise) for noise in noises if noise.on in (what, On.ALL)]
        if len(found) > 1:
            fix = "leave one out; noise of sigma a and b together is noise of sigma sqrt(a^2 + b^2)"
            raise _error("noise", "; ".join(found), rule=f"is given twice on {what}", fix=fix)


def _error(name: str, value: object, *, rule: str, fix: str) -> InputError:
    return InputError(where=WHERE, field=name, value=value, rule=rule, fix=fix)

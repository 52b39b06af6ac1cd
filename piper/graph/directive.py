"""`Directive`: the base of what a strategy file says, the readers of its fields, and how it states a fact.

A directive is a frozen dataclass: its fields are the file syntax, `apply` is the rewrite. `where`
(file and line) does not count in comparisons.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from cost_models.errors import LARGEST_COUNT, as_float, nearest
from piper.errors import StrategyError
from piper.graph.facts import Fact, require_unclaimed
from piper.graph.filters import Filter
from piper.graph.graph import Graph, Node

_NAMELESS = ("where",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive(ABC):
    """One entry of a strategy."""

    op: ClassVar[str]
    keys: ClassVar[tuple[str, ...]]

    where: str = field(default="strategy", compare=False, repr=False)

    @classmethod
    @abstractmethod
    def from_json(cls, entry: Mapping[str, Any], *, where: str) -> Self:
        """Read the file form; raises StrategyError with the field."""

    def to_json(self) -> dict[str, Any]:
        """Return the file form, without fields that have their default."""
        stated = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in _NAMELESS and (f.default is MISSING or getattr(self, f.name) != f.default)
        }
        return {"op": self.op} | {name: _plain(value) for name, value in stated.items()}

    @abstractmethod
    def apply(self, graph: Graph) -> Graph:
        """Return the rewritten graph."""


def _plain(value: object) -> object:
    if isinstance(value, Filter):
        return value.to_json()
    return list(value) if isinstance(value, tuple) else value


def refuse_unknown_keys(entry: Mapping[str, Any], keys: Sequence[str], *, where: str, op: str) -> None:
    """Raise unless every key of a directive is `op` or one of `keys`."""
    for key in entry:
        if key != "op" and key not in keys:
            raise StrategyError(
                where=where, field=f"{op}.{key}", value=entry[key], rule="is not a field of this directive",
                fix=nearest(str(key), keys),
            )  # fmt: skip


def read_filter(entry: Mapping[str, Any], *, where: str, op: str) -> Filter:
    """Read the `filter` field (required)."""
    if "filter" not in entry:
        raise StrategyError(
            where=where, field=f"{op}.filter", value=None, rule="is missing",
            fix='say what it applies to: {"PP": 0}, or {} for everything',
        )  # fmt: skip
    return Filter.parse(entry["filter"], where=where, field=f"{op}.filter")


def read_whole_number(value: object, *, where: str, name: str, least: int = 1) -> int:
    """Return `value` if it is a whole number >= `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise StrategyError(
            where=where, field=name, value=value, rule=f"must be a whole number >= {least}",
            fix=f"give a number such as {max(least, 1)}",
        )  # fmt: skip
    if value > LARGEST_COUNT:
        raise StrategyError(
            where=where, field=name, value=value, rule=f"must be at most {LARGEST_COUNT}",
            fix=f"give a number such as {max(least, 1)}",
        )  # fmt: skip
    return value


def read_factor(value: object, *, where: str, name: str) -> float:
    """Return `value` if it is a finite number >= 1."""
    number = as_float(value)
    if not 1 <= number < float("inf"):
        raise StrategyError(
            where=where, field=name, value=value, rule="must be a number >= 1", fix="write for example 1.25"
        )
    return number


def read_flag(value: object, *, where: str, name: str) -> bool:
    """Return `value` if it is true or false."""
    if not isinstance(value, bool):
        raise StrategyError(
            where=where, field=name, value=value, rule="must be true or false", fix="write true or false"
        )
    return value


def read_name(value: object, *, where: str, name: str) -> str:
    """Return `value` if it is a text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise StrategyError(
            where=where, field=name, value=value, rule="must be a name", fix='write a name such as "dp"'
        )
    return value


def read_choice(value: object, known: Sequence[str], *, where: str, name: str) -> str:
    """Return `value` if it is one of `known`."""
    if not isinstance(value, str) or value not in known:
        raise StrategyError(
            where=where, field=name, value=value, rule=f"must be one of {', '.join(known)}",
            fix=nearest(str(value), known),
        )  # fmt: skip
    return value


def read_devices(entry: Mapping[str, Any], *, where: str, op: str) -> tuple[int, ...] | None:
    """Read `devices` (or the alias `device`), the reference's list of symbolic device numbers, if there."""
    names = [name for name in ("devices", "device") if name in entry]
    if len(names) > 1:
        raise StrategyError(
            where=where, field=f"{op}.device", value=entry["device"],
            rule="is an alias of devices, which is given too", fix="keep devices only",
        )  # fmt: skip
    if not names:
        return None
    value = entry[names[0]]
    if not isinstance(value, list) or not value:
        raise StrategyError(
            where=where, field=f"{op}.devices", value=value, rule="must be a list of device numbers",
            fix='write for example "devices": [0, 1]',
        )  # fmt: skip
    return tuple(read_whole_number(item, where=where, name=f"{op}.devices", least=0) for item in value)


def matched(graph: Graph, which: Filter, *, where: str, op: str) -> tuple[Node, ...]:
    """Return the compute nodes that a filter means; raises when a tag is unknown or nothing matches.

    A backward stands for its halves too: PASS BI or BW means it.
    """
    require_tags(graph, which, where=where, field=f"{op}.filter")
    halves = {"BI", "BW"}
    whole = which if which.passes is None or not which.passes & halves else _with_whole_backward(which)
    pairs = whole.pairs
    if pairs is None:
        found = tuple(n for n in graph.nodes if whole.matches(dict(n.tags), n.kind.name))
    else:  # the usual case, for graphs of many layers and as many directives
        found = tuple(n for n in graph.nodes if all(pair in n.tags for pair in pairs))
    if not found:
        raise StrategyError(
            where=where, field=f"{op}.filter", value=which.source, rule="matches nothing in the model",
            fix=f"the model has {_ranges(graph)}",
        )  # fmt: skip
    return found


REGION_TAGS = {"TP": "matmuls", "EP": "experts", "CP": "attention"}
"""Tag that a shorthand key of the same name cuts by -> what it is put on."""


def require_tags(
    graph: Graph, which: Filter, *, where: str, field: str, dimensions: tuple[str, ...] = ()
) -> None:
    """Raise unless the model has every tag that a filter names, `dimensions` apart."""
    known = (*graph.model.tag_names, *dimensions)
    for tag in which.tag_names:
        if tag not in known:
            raise StrategyError(
                where=where, field=field, value=which.source,
                rule=f"names the tag {tag}, which nothing in the model has",
                fix=_way_to(tag) if tag in REGION_TAGS else nearest(tag, known),
            )  # fmt: skip


def _way_to(tag: str) -> str:
    """Say how a model comes by a tag that Piper gives a meaning of its own."""
    key = tag.lower()
    return (
        f"leave {key} at 1, or tag the {REGION_TAGS[tag]} of the model: piper.annotate_modules from outside, "
        f'or `with piper.annotate("{tag}")` in its forward'
    )


def claimed(graph: Graph, which: Filter, *, where: str, op: str) -> tuple[int, ...]:
    """Return the segments that a filter means, rising; raises as `matched` does."""
    return tuple(sorted({n.first_segment for n in matched(graph, which, where=where, op=op)}))


def claimed_regions(graph: Graph, which: Filter, tag: str, *, where: str, op: str) -> tuple[int, ...]:
    """Return the segments tagged `tag` of those that a filter means, rising; raises when there is none.

    How a region is cut follows from its operations, which capture derives in these scopes only.
    """
    tagged = {i for i, segment in enumerate(graph.model.segments) if tag in dict(segment.tags)}
    segments = tuple(i for i in claimed(graph, which, where=where, op=op) if i in tagged)
    if not segments:
        raise StrategyError(
            where=where, field=f"{op}.filter", value=which.source, rule=f"means no region tagged {tag}",
            fix=f'write {{"{tag}": "*"}}'
            if tagged
            else f'put the regions of the model into `with piper.annotate("{tag}")`',
        )  # fmt: skip
    return segments


def state(graph: Graph, name: str, fact: Fact, *, op: str, value: object) -> Graph:
    """Return the graph with one more fact in the field `name`; raises when its segments are claimed."""
    stated: tuple[Fact, ...] = getattr(graph, name)
    require_unclaimed(stated, fact.segments, where=fact.where, op=op, value=value)
    change: dict[str, Any] = {name: tuple(sorted((*stated, fact), key=lambda f: f.segments))}
    return replace(graph, **change)


def _with_whole_backward(which: Filter) -> Filter:
    return replace(which, passes=(which.passes or frozenset()) | {"B"})


def _ranges(graph: Graph) -> str:
    highest: dict[str, int] = {}
    for node in graph.nodes:
        for tag, index in node.tags:
            highest[tag] = max(highest.get(tag, 0), index)
    return ", ".join(f"{tag} up to {index}" for tag, index in sorted(highest.items()))

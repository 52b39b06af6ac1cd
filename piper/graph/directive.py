"""`Directive`: the base of what a strategy file says, and the readers of its fields.

A directive is a frozen dataclass: its fields are the file syntax, `apply` is the rewrite. `where`
(file and line) does not count in comparisons.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from cost_models.errors import LARGEST_COUNT, nearest
from piper.errors import StrategyError
from piper.graph.filters import Filter
from piper.graph.graph import Graph, Node


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

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the file form, without fields that have their default."""

    @abstractmethod
    def apply(self, graph: Graph) -> Graph:
        """Return the rewritten graph."""


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


def read_flag(value: object, *, where: str, name: str) -> bool:
    """Return `value` if it is true or false."""
    if not isinstance(value, bool):
        raise StrategyError(
            where=where, field=name, value=value, rule="must be true or false", fix="write true or false"
        )
    return value


def not_yet(where: str, name: str, value: object, *, instead: str) -> StrategyError:
    """Return the error for something that the language has but this version does not execute."""
    return StrategyError(
        where=where, field=name, value=value, rule="is not available in this version", fix=instead
    )


def matched(graph: Graph, which: Filter, *, where: str, op: str) -> tuple[Node, ...]:
    """Return the compute nodes that a filter means; raises when a tag is unknown or nothing matches."""
    known = sorted({tag for node in graph.nodes for tag, _ in node.tags})
    for tag in which.tag_names:
        if tag not in known:
            raise StrategyError(
                where=where, field=f"{op}.filter", value=which.source, rule=f"names the tag {tag}",
                fix=f"the model has the tags {', '.join(known)}: {nearest(tag, known)}",
            )  # fmt: skip
    found = tuple(n for n in graph.nodes if which.matches(dict(n.tags), n.kind.name))
    if not found:
        raise StrategyError(
            where=where, field=f"{op}.filter", value=which.source, rule="matches nothing in the model",
            fix=f"the model has {_ranges(graph)}",
        )  # fmt: skip
    return found


def _ranges(graph: Graph) -> str:
    highest: dict[str, int] = {}
    for node in graph.nodes:
        for tag, index in node.tags:
            highest[tag] = max(highest.get(tag, 0), index)
    return ", ".join(f"{tag} up to {index}" for tag, index in sorted(highest.items()))

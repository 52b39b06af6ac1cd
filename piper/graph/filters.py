"""Filters: which nodes of the graph a directive speaks about.

[Note: filters]
A filter is an object: tag name -> what its index must be; all pairs must hold. A value is
  3 or "3"            exactly this index          "*"        the tag is there, any index
  [0, 2, 5]           one of these                "0-3,7"    ranges and lists as text
  {"not": VALUE}      anything else, also a node without the tag
  null or "-"         the tag is not there (the same as {"not": "*"})
The key PASS takes F, B, BI or BW or a list of them; without it F, B, BI and BW all match.
`{}` matches every node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cost_models.errors import whole_number
from piper.errors import StrategyError

PASSES = ("F", "B", "BI", "BW")
_LONGEST_RANGE = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What the index of one tag must be: any of `indices` (None: any index), or with `negated` not so."""

    tag: str
    indices: frozenset[int] | None
    negated: bool = False

    def holds(self, tags: Mapping[str, int]) -> bool:
        """Return whether the tags fulfil this condition."""
        present = self.tag in tags and (self.indices is None or tags[self.tag] in self.indices)
        return present is not self.negated

    def to_json(self) -> object:
        """Return the value of the file form."""
        listed = sorted(self.indices or ())
        value: object = "*" if self.indices is None else listed if len(listed) > 1 else listed[0]
        return {"not": value} if self.negated else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """A conjunction of conditions and a set of passes; built by `Filter.parse`."""

    conditions: tuple[Condition, ...] = ()
    passes: frozenset[str] | None = None
    source: str = field(default="{}", compare=False)

    def matches(self, tags: Mapping[str, int], kind: str) -> bool:
        """Return whether a node with these tags and this pass letter is meant."""
        if self.passes is not None and kind not in self.passes:
            return False
        return self.matches_tags(tags)

    def matches_tags(self, tags: Mapping[str, int]) -> bool:
        """Return whether a node with these tags is meant, whatever its pass."""
        return all(condition.holds(tags) for condition in self.conditions)

    @property
    def pairs(self) -> tuple[tuple[str, int], ...] | None:
        """Return the tags with their indices, when it demands one index of each and no pass; else None."""
        exact = [(condition.tag, self.exact(condition.tag)) for condition in self.conditions]
        listed = tuple((tag, index) for tag, index in exact if index is not None)
        return listed if len(listed) == len(exact) and self.passes is None else None

    @property
    def tag_names(self) -> tuple[str, ...]:
        """Return the tags it mentions, rising."""
        return tuple(condition.tag for condition in self.conditions)

    def condition(self, tag: str) -> Condition | None:
        """Return what it says about one tag."""
        return next((condition for condition in self.conditions if condition.tag == tag), None)

    def listed(self, tag: str) -> tuple[int, ...]:
        """Return the indices of `tag` that it lists, rising; empty when it lists none."""
        found = self.condition(tag)
        return () if found is None or found.negated else tuple(sorted(found.indices or ()))

    def exact(self, tag: str) -> int | None:
        """Return the one index that it demands of `tag`, or None."""
        indices = self.listed(tag)
        return indices[0] if len(indices) == 1 else None

    def without(self, tag: str) -> Filter:
        """Return the filter without its condition on one tag."""
        kept = tuple(condition for condition in self.conditions if condition.tag != tag)
        return Filter(conditions=kept, passes=self.passes, source=self.source)

    def to_json(self) -> dict[str, object]:
        """Return the file form; `parse` is its inverse."""
        values = {condition.tag: condition.to_json() for condition in self.conditions}
        if self.passes is None:
            return values
        letters = [letter for letter in PASSES if letter in self.passes]
        return values | {"PASS": letters[0] if len(letters) == 1 else letters}

    @classmethod
    def parse(cls, value: object, *, where: str, field: str = "filter") -> Filter:
        """Read the JSON form; raises `StrategyError` that names the tag."""
        if not isinstance(value, Mapping):
            raise StrategyError(
                where=where, field=field, value=value, rule="must be an object of tag: index",
                fix='write for example {"PP": 0} or {} for everything',
            )  # fmt: skip
        passes = _passes(value["PASS"], where=where, field=f"{field}.PASS") if "PASS" in value else None
        conditions = tuple(
            _condition(str(tag), index, where=where, field=f"{field}.{tag}")
            for tag, index in sorted(value.items(), key=lambda pair: str(pair[0]))
            if tag != "PASS"
        )
        return cls(conditions=conditions, passes=passes, source=_text(value))


def _passes(value: object, *, where: str, field: str) -> frozenset[str]:
    letters = [value] if isinstance(value, str) else value
    if not isinstance(letters, list) or not letters or any(letter not in PASSES for letter in letters):
        raise StrategyError(
            where=where, field=field, value=value, rule="must be F, B, BI, BW or a list of them",
            fix='for example "PASS": "F" or "PASS": ["B", "BW"]',
        )  # fmt: skip
    return frozenset(letters)


def _condition(tag: str, value: object, *, where: str, field: str) -> Condition:
    if isinstance(value, Mapping):
        if set(value) != {"not"}:
            raise _bad_index(value, where=where, field=field)
        inner = _condition(tag, value["not"], where=where, field=f"{field}.not")
        return Condition(tag=tag, indices=inner.indices, negated=not inner.negated)
    if value is None or value == "-":
        return Condition(tag=tag, indices=None, negated=True)
    if value == "*":
        return Condition(tag=tag, indices=None)
    return Condition(tag=tag, indices=_indices(value, where=where, field=field))


def _indices(value: object, *, where: str, field: str) -> frozenset[int]:
    if isinstance(value, bool) or value is None:
        raise _bad_index(value, where=where, field=field)
    if isinstance(value, int) and value >= 0:
        return frozenset({value})
    if isinstance(value, list) and value:
        return frozenset().union(*(_indices(item, where=where, field=field) for item in value))
    if isinstance(value, str):
        return frozenset().union(
            *(_range(part, value, where=where, field=field) for part in value.split(","))
        )
    raise _bad_index(value, where=where, field=field)


def _range(part: str, whole: str, *, where: str, field: str) -> frozenset[int]:
    start, dash, end = part.strip().partition("-")
    first, last = whole_number(start), whole_number(end if dash else start)
    if first is None or last is None or not first <= last < first + _LONGEST_RANGE:
        raise _bad_index(whole, where=where, field=field)
    return frozenset(range(first, last + 1))


def _bad_index(value: object, *, where: str, field: str) -> StrategyError:
    return StrategyError(
        where=where, field=field, value=value,
        rule='must be an index >= 0, a list, a range such as "0-3", "*", null or {"not": ...}',
        fix="say which indices of the tag are meant",
    )  # fmt: skip


def _text(value: Mapping[Any, Any]) -> str:
    pairs = ", ".join(f"{tag}: {index}" for tag, index in value.items())
    return "{" + pairs + "}"

"""`Strategy`: what the user said, as a shorthand or as directives, before it meets a model and a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from cost_models.documents import exists
from piper.directives import Mesh, Order, Place, Recompute, Replicate, Split
from piper.errors import StrategyError
from piper.graph.directive import Directive
from piper.strategy.files import read_directives
from piper.strategy.shorthand import Shorthand, parse_shorthand, refuse_unavailable

D = TypeVar("D", bound=Directive)

_FILE_SUFFIXES = {".json", ".yaml", ".yml"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A strategy as it was stated.

    Args:
        stated: what a shorthand (or the facts of a file) says.
        directives: the entries of a file; empty for a shorthand.
        where: for error messages: the file, or the option.
    """

    stated: Shorthand = field(default_factory=Shorthand)
    directives: tuple[Directive, ...] = ()
    where: str = field(default="--strategy", compare=False)

    @classmethod
    def parse(cls, text: str, *, where: str = "--strategy") -> Strategy:
        """Read a shorthand; an empty text leaves everything to the defaults."""
        if not text.strip():
            return cls(where=where)
        stated = parse_shorthand(text, where=where)
        refuse_unavailable(stated, where=where)
        return cls(stated=stated, where=where)

    @classmethod
    def load(cls, path: Path) -> Strategy:
        """Read a strategy file."""
        directives = with_places(read_directives(path), where=str(path))
        return cls(stated=facts(directives, where=str(path)), directives=directives, where=str(path))

    @property
    def shorthand(self) -> str:
        """Return the canonical shorthand of what was stated."""
        return str(self.stated)


def load_strategy(text: str, *, where: str = "--strategy") -> Strategy:
    """Read a strategy from a file (a path that exists or ends like one) or from a shorthand."""
    path = Path(text)
    if path.suffix.lower() in _FILE_SUFFIXES or ("=" not in text and text.strip() and exists(path)):
        return Strategy.load(path)
    return Strategy.parse(text, where=where)


def facts(directives: tuple[Directive, ...], *, where: str) -> Shorthand:
    """Return degrees, microbatch size, schedule, ZeRO and recompute of a list of directives."""
    mesh = _only(directives, Mesh, where=where)
    sizes = dict(mesh.axes) if mesh else {}
    split = _only(directives, Split, where=where)
    named = [d for d in directives if isinstance(d, Order) and d.schedule is not None]
    orders = [d for d in directives if isinstance(d, Order)]
    if named and len(orders) > 1:
        raise StrategyError(
            where=orders[1].where, field="order", value="a second order",
            rule=f"conflicts with the schedule at {named[0].where}", fix="keep the schedule or the rows",
        )  # fmt: skip
    return Shorthand(
        pp=sizes.get("pp", 1) if mesh else None,
        dp=sizes.get("dp", 1) if mesh else None,
        zero=1 if any(d.shard_optimizer for d in _all(directives, Replicate)) else None,
        schedule=named[0].schedule if named else ("custom" if orders else None),
        recompute="full" if _all(directives, Recompute) else None,
        micro_batch=split.micro_batch if split else None,
    )


def with_places(directives: tuple[Directive, ...], *, where: str) -> tuple[Directive, ...]:
    """Return directives in which device lists became positions on a mesh.

    The reference's device numbers are symbolic: equal lists are one pipeline rank, ordered by their
    lowest number, and the length of a list is the number of replicas.
    """
    places = _all(directives, Place)
    listed = [place for place in places if place.devices is not None]
    if not listed:
        return directives
    if len(listed) != len(places):
        raise StrategyError(
            where=places[0].where, field="place.devices", value="some", rule="are given on some places only",
            fix='use "at" or "devices" throughout',
        )  # fmt: skip
    lists = sorted({place.devices for place in listed if place.devices is not None})
    if len({len(devices) for devices in lists}) != 1:
        raise StrategyError(
            where=listed[0].where, field="place.devices", value=[list(d) for d in lists],
            rule="must all have the same length", fix="give every stage the same number of devices",
        )  # fmt: skip
    _require_groups(listed)
    mesh = Mesh(axes=(("dp", len(lists[0])), ("pp", len(lists))), where=listed[0].where)
    stated = [d for d in directives if isinstance(d, Mesh)]
    if stated and dict(stated[0].axes) != dict(mesh.axes):
        raise StrategyError(
            where=stated[0].where, field="mesh.axes", value=dict(stated[0].axes),
            rule=f"contradicts the device lists, which say {dict(mesh.axes)}", fix="make them agree",
        )  # fmt: skip
    placed = tuple(
        Place(filter=d.filter, pp=lists.index(d.devices), units=d.units, where=d.where)
        if isinstance(d, Place) and d.devices is not None
        else d
        for d in directives
    )
    return placed if stated else (mesh, *placed)


def _require_groups(places: list[Place]) -> None:
    """Raise unless device lists are groups: no device twice in one, none in two that differ."""
    group_of: dict[int, tuple[int, ...]] = {}
    for place in places:
        devices = place.devices or ()
        shared = [device for device in devices if group_of.setdefault(device, devices) != devices]
        if shared or len(set(devices)) < len(devices):
            rule = (
                f"shares device {shared[0]} with {list(group_of[shared[0]])}"
                if shared
                else "repeats a device"
            )
            raise StrategyError(
                where=place.where, field="place.devices", value=list(devices), rule=rule,
                fix="give each stage devices of its own, or exactly those of another stage",
            )  # fmt: skip


def _all(directives: tuple[Directive, ...], kind: type[D]) -> list[D]:
    return [d for d in directives if isinstance(d, kind)]


def _only(directives: tuple[Directive, ...], kind: type[D], *, where: str) -> D | None:
    found = _all(directives, kind)
    if len({repr(d) for d in found}) > 1:
        raise StrategyError(
            where=found[1].where,
            field=kind.op,
            value="a second one",
            rule=f"conflicts with the one at {found[0].where}",
            fix=f"keep one {kind.op}",
        )
    return found[0] if found else None

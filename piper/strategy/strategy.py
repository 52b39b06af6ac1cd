"""`Strategy`: what the user said, as a shorthand or as directives, before it meets a model and a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from cost_models.documents import exists
from piper.directives import Mesh, Offload, Order, Recompute, Replicate, Shard, ShardTensor, Split
from piper.errors import StrategyError
from piper.graph.directive import Directive
from piper.strategy.files import read_directives
from piper.strategy.places import with_places
from piper.strategy.shorthand import Shorthand, parse_shorthand

D = TypeVar("D", bound=Directive)
T = TypeVar("T")

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
        return cls(stated=parse_shorthand(text, where=where), where=where)

    @classmethod
    def load(cls, path: Path) -> Strategy:
        """Read a strategy file."""
        directives = with_places(read_directives(path))
        return cls(stated=facts(directives, where=str(path)), directives=directives, where=str(path))

    def line_of(self, *kinds: type[Directive]) -> str:
        """Return file and line of the first directive of these kinds, the kinds in order, else `where`."""
        whole = [d for d in self.directives if d not in self.stage_meshes]
        return next((d.where for kind in kinds for d in whole if isinstance(d, kind)), self.where)

    @property
    def stage_meshes(self) -> tuple[Mesh, ...]:
        """Return the meshes of single stages."""
        return tuple(d for d in self.directives if isinstance(d, Mesh) and d.filter is not None)

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
    """Return what a list of directives says in terms of the shorthand."""
    meshes = tuple(d for d in directives if isinstance(d, Mesh) and d.filter is None)
    mesh = _only(meshes, Mesh, where=where)
    split = _only(directives, Split, where=where)
    named = [d for d in directives if isinstance(d, Order) and d.schedule is not None]
    orders = [d for d in directives if isinstance(d, Order)]
    if named and len(orders) > 1:
        raise StrategyError(
            where=orders[1].where, field="order", value="a second order",
            rule=f"conflicts with the schedule at {named[0].where}", fix="keep the schedule or the rows",
        )  # fmt: skip
    sizes = dict(mesh.axes) if mesh else {}
    experts = _all(directives, Shard)
    tensors = _all(directives, ShardTensor)
    replicas = _all(directives, Replicate)
    return Shorthand(
        tp=sizes.get("tp"),
        pp=sizes.get("pp", 1) if mesh else None,
        vp=named[0].vp if named else None,
        cp=sizes.get("cp"),
        ep=_largest([d.degree for d in experts]) or sizes.get("ep"),
        etp=_largest([d.tensor_degree for d in experts]) or sizes.get("etp"),
        dp=mesh.size("dp") if mesh else None,
        hsdp=_largest([d.shard_ranks for d in replicas]) or (mesh.shard_ranks if mesh else None),
        zero=_largest([d.zero for d in replicas]),
        sp=("on" if any(d.sequence_parallel for d in tensors) else "off") if tensors else None,
        schedule=named[0].schedule if named else ("custom" if orders else None),
        recompute=_recompute(_all(directives, Recompute)),
        micro_batch=split.micro_batch if split else None,
        async_tp="on" if any(d.asynchronous for d in tensors) else None,
        offload=_agreed([d.what for d in _all(directives, Offload)]),
        bucket_mb=_agreed([d.bucket_mb for d in replicas]),
        prefetch=_agreed([d.prefetch for d in replicas]),
    )


def _recompute(stated: Sequence[Recompute]) -> str | None:
    modes = sorted({d.mode if d.layers is None else f"{d.mode}:{d.layers}" for d in stated})
    return modes[-1] if modes else None


def _agreed(values: Sequence[T | None]) -> T | None:
    """Return what all directives say, or None: the shorthand cannot say it."""
    return values[0] if len(set(values)) == 1 else None


def _largest(values: list[int | None]) -> int | None:
    """Return the largest stated value, or None: nothing, or 0."""
    return max((value for value in values if value), default=None)


def _all(directives: Sequence[Directive], kind: type[D]) -> list[D]:
    return [d for d in directives if isinstance(d, kind)]


def _only(directives: Sequence[Directive], kind: type[D], *, where: str) -> D | None:
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

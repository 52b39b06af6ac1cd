"""The space: which strategies a model has on a number of devices; illegal ones are named and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product

from cost_models.errors import nearest, whole_number
from piper.errors import JobError
from piper.strategy import Shorthand

MICRO_BATCHES = (1, 2, 4, 8, 16)
SCHEDULES = ("1f1b", "gpipe")
ZERO_STAGES = (0, 1)
RECOMPUTE = ("none", "full")
_CHOICES = {"recompute": RECOMPUTE, "schedule": SCHEDULES, "zero": tuple(map(str, ZERO_STAGES))}
"""Dimensions that are not numbers, and their values as text."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Candidate:
    """One point of the space, in canonical form: values that change nothing are set to one choice."""

    pp: int
    dp: int
    micro_batch: int
    recompute: str
    zero: int
    schedule: str

    @property
    def shorthand(self) -> Shorthand:
        """Return it as a strategy."""
        return Shorthand(
            pp=self.pp,
            dp=self.dp,
            zero=self.zero,
            schedule=self.schedule,
            recompute=self.recompute,
            micro_batch=self.micro_batch,
        )

    @property
    def family(self) -> str:
        """Return what is said of it when it loses together with others."""
        return f"pp={self.pp},recompute={self.recompute}"


DIMENSIONS = tuple(f.name for f in fields(Candidate))


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """All candidates of a search.

    Args:
        candidates: legal and distinct, in canonical order.
        size: raw points, before rules and duplicates.
        illegal: (family, reason) -> how many points a rule forbids.
        duplicates: points that another one stands for.
    """

    candidates: tuple[Candidate, ...]
    size: int
    illegal: Mapping[tuple[str, str], int]
    duplicates: int


def enumerate_space(
    *,
    gpus: int,
    num_units: int,
    global_batch: int,
    pin: Mapping[str, str] | None = None,
    forbid: Sequence[tuple[str, str]] = (),
) -> Space:
    """Return the space of a job.

    Args:
        gpus: devices.
        num_units: units at which the model can be cut: the largest pipeline degree.
        global_batch: sequences per step.
        pin: dimension -> the only value allowed.
        forbid: (dimension, value) pairs to leave out.
    Raises: JobError for a dimension or value that does not exist.
    """
    pinned = dict(pin or {})
    require_values(tuple(pinned.items()), where="--pin")
    require_values(forbid, where="--forbid")
    illegal: Counter[tuple[str, str]] = Counter()
    found: dict[Candidate, None] = {}
    size = duplicates = 0
    for raw in _points(gpus, pinned):
        if any(str(getattr(raw, name)) == value for name, value in forbid):
            continue
        size += 1
        reason = _illegal(raw, num_units=num_units, global_batch=global_batch)
        if reason:
            illegal[raw.family, reason] += 1
            continue
        candidate = _canonical(raw, free={name for name in DIMENSIONS if name not in pinned})
        if candidate in found:
            duplicates += 1
        found[candidate] = None
    return Space(candidates=tuple(sorted(found)), size=size, illegal=dict(illegal), duplicates=duplicates)


def require_values(pairs: Sequence[tuple[str, str]], *, where: str) -> None:
    """Raise JobError for a pair whose dimension, or value in it, no search has."""
    for name, value in pairs:
        if name not in DIMENSIONS:
            raise JobError(
                where=where, field="dimension", value=name, rule="is no dimension of the search",
                fix=nearest(name, DIMENSIONS),
            )  # fmt: skip
        known = _CHOICES.get(name)
        if known is None and not _numbers(value):
            rule, fix = "must be a whole number >= 1", f"write for example {name}=2"
            raise JobError(where=where, field=name, value=value, rule=rule, fix=fix)
        if known is not None and value not in known:
            rule = "is not searched in this version"
            raise JobError(where=where, field=name, value=value, rule=rule, fix=nearest(value, known))


def _points(gpus: int, pinned: Mapping[str, str]) -> Iterable[Candidate]:
    degrees = [d for d in range(1, gpus + 1) if gpus % d == 0]
    sizes = sorted({*MICRO_BATCHES, *_numbers(pinned.get("micro_batch"))})
    for pp, micro_batch, recompute, zero, schedule in product(
        degrees, sizes, RECOMPUTE, ZERO_STAGES, SCHEDULES
    ):
        point = Candidate(
            pp=pp, dp=gpus // pp, micro_batch=micro_batch, recompute=recompute, zero=zero, schedule=schedule
        )
        if all(str(getattr(point, name)) == value for name, value in pinned.items()):
            yield point


def _numbers(text: str | None) -> tuple[int, ...]:
    number = whole_number(text or "")
    return (number,) if number else ()


def _illegal(point: Candidate, *, num_units: int, global_batch: int) -> str:
    if point.pp > num_units:
        return f"more stages than the model's {num_units} units"
    if global_batch % point.dp:
        return f"the global batch {global_batch} is no multiple of dp"
    if point.micro_batch > global_batch // point.dp:
        return "the microbatch is larger than the replica batch"
    return ""


def _canonical(point: Candidate, *, free: set[str]) -> Candidate:
    """Return the point that stands for it: ZeRO over one replica, the order of one stage change nothing."""
    zero = 0 if point.dp == 1 and "zero" in free else point.zero
    schedule = SCHEDULES[0] if point.pp == 1 and "schedule" in free else point.schedule
    return Candidate(
        pp=point.pp,
        dp=point.dp,
        micro_batch=point.micro_batch,
        recompute=point.recompute,
        zero=zero,
        schedule=schedule,
    )

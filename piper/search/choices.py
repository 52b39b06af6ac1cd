"""`Choices`: the values that a search tries in every dimension, after pins, refusals and ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cost_models.errors import LARGEST_COUNT, nearest, whole_number
from piper.errors import JobError
from piper.search.candidate import DIMENSIONS
from piper.search.schedule_rules import RULES
from piper.strategy.cuts import BALANCED, EVEN

FRACTION = "%"
TP = -1
"""The choice of etp that stands for tp."""

MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)
VIRTUAL_STAGES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20)
BUCKETS_MB = (0, 32, 128, 512)
PREFETCHES = (0, 2, 8)
"""In tasks that compute: a layer of which nothing is cut has one, one that is cut over tp about seven."""
ZERO_STAGES = (0, 1, 2, 3)
HSDP = (0, -1)
RECOMPUTE = ("none", "selective", "full", "full:25%", "full:50%", "full:75%")
TEXTS: dict[str, tuple[str, ...]] = {
    "sp": ("on", "off"),
    "schedule": tuple(name for name in RULES if not name.startswith("synthesized")),
    "recompute": RECOMPUTE,
    "async_tp": ("off", "on"),
    "offload": ("none", "optimizer", "activations", "params"),
    "cut": (BALANCED,),
}
"""Dimensions that are not numbers, and the values that are tried. Orders are synthesized for a job that is
known (`piper.search.synthesis`): only where that is asked for; so is the default cut into stages."""
MOST = {"tp": 16, "cp": 16}
"""Largest degrees that are tried unless they are stated: published runs have at most 16 of each (the largest
are Narayanan et al. 2021 with tp = 8, Llama 3 405B with cp = 16, arXiv 2407.21783), and each costs probes."""
DEGREES = ("gpus", "tp", "pp", "cp", "dp")
_MAY_BE_ZERO = {"zero", "hsdp", "bucket_mb", "prefetch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Values of every dimension.

    Args:
        values: dimension -> values: numbers, or texts; a degree without an entry takes any divisor.
        forbidden: dimension -> values to leave out.
    """

    values: Mapping[str, tuple[int, ...] | tuple[str, ...]]
    forbidden: Mapping[str, frozenset[str]]

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return the values of a dimension of numbers."""
        return tuple(int(value) for value in self.values[name])

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the values of a dimension of texts."""
        return tuple(str(value) for value in self.values[name])

    def divisors(self, name: str, number: int) -> tuple[int, ...]:
        """Return the values of a degree that divide a number."""
        stated = self.values.get(name)
        most = min(number, MOST.get(name, number))
        listed = range(1, most + 1) if stated is None else sorted(int(value) for value in stated)
        return tuple(d for d in listed if number % d == 0 and self.allows(name, d))

    def allows(self, name: str, value: int) -> bool:
        """Return whether a degree may have a value."""
        stated = self.values.get(name)
        return str(value) not in self.forbidden.get(name, ()) and (stated is None or value in stated)

    @property
    def plainest_schedule(self) -> int:
        """Return which schedule stands for all on a pipeline of one rank."""
        texts = self.texts("schedule")
        return texts.index("1f1b") if "1f1b" in texts else 0

    @property
    def num_workings(self) -> int:
        """Return the raw number of ways of working."""
        return len(self.texts("sp")) * len(self.texts("async_tp")) * len(self.texts("recompute"))

    @property
    def num_keepings(self) -> int:
        """Return the raw number of ways of keeping state."""
        sizes = [len(self.values[name]) for name in ("zero", "hsdp", "offload", "bucket_mb", "prefetch")]
        return sizes[0] * sizes[1] * sizes[2] * sizes[3] * sizes[4]


def choices_of(
    *,
    gpus: Sequence[int],
    num_units: int,
    experts: Sequence[int] = (),
    cuts_tensors: bool = False,
    cuts_sequences: bool = False,
    pin: Mapping[str, str] | None = None,
    forbid: Sequence[tuple[str, str]] = (),
    values: Mapping[str, Sequence[int | str]] | None = None,
) -> Choices:
    """Return the values that a search tries.

    Args:
        gpus: numbers of devices.
        num_units: of the model.
        experts: of each of its regions.
        cuts_tensors, cuts_sequences: whether it can be cut over tp, over cp.
        pin: dimension -> the only value allowed.
        forbid: (dimension, value) pairs to leave out.
        values: dimension -> the values to try instead of ours.
    Raises: JobError for a dimension or value that does not exist.
    """
    pinned = dict(pin or {})
    require_values(tuple(pinned.items()), where="--pin")
    require_values(forbid, where="--forbid")
    most = max(experts, default=1)
    found: dict[str, tuple[int, ...] | tuple[str, ...]] = {
        **TEXTS,
        "gpus": tuple(gpus),
        "vp": tuple(v for v in VIRTUAL_STAGES if v <= max(1, num_units)),
        "ep": tuple(d for d in range(1, most + 1) if most % d == 0),
        "etp": (1, TP) if experts else (1,),
        "micro_batch": MICRO_BATCHES,
        "zero": ZERO_STAGES,
        "hsdp": HSDP,
        "bucket_mb": BUCKETS_MB,
        "prefetch": PREFETCHES,
    }
    if not cuts_tensors:
        found |= {"tp": (1,), "sp": ("on",), "async_tp": ("off",)}
    if not cuts_sequences:
        found["cp"] = (1,)
    stated = {name: tuple(listed) for name, listed in (values or {}).items()}
    require_values([(n, str(v)) for n, listed in stated.items() for v in listed], where="--space")
    found |= {name: _typed(name, listed) for name, listed in stated.items()}
    found |= {name: _typed(name, (value,)) for name, value in pinned.items()}
    forbidden: dict[str, set[str]] = {}
    for name, value in forbid:
        forbidden.setdefault(name, set()).add(value)
    kept = {
        name: tuple(value for value in listed if str(value) not in forbidden.get(name, ()))
        for name, listed in found.items()
    }
    return Choices(values=kept, forbidden={name: frozenset(listed) for name, listed in forbidden.items()})  # type: ignore[arg-type]


def _typed(name: str, listed: Sequence[int | str]) -> tuple[int, ...] | tuple[str, ...]:
    if name in TEXTS:
        return tuple(str(value) for value in listed)
    return tuple(int(value) for value in listed)


def require_values(pairs: Sequence[tuple[str, str]], *, where: str) -> None:
    """Raise JobError for a pair whose dimension, or value in it, no search has."""
    for name, value in pairs:
        if name not in DIMENSIONS:
            raise JobError(
                where=where, field="dimension", value=name, rule="is no dimension of the search",
                fix=nearest(name, DIMENSIONS),
            )  # fmt: skip
        if name in TEXTS:
            _require_text(name, value, where=where)
        else:
            _require_number(name, value, where=where)


def _require_number(name: str, value: str, *, where: str) -> None:
    number = whole_number(value)
    least = 0 if name in _MAY_BE_ZERO else 1
    if number is None or not least <= number <= LARGEST_COUNT:
        rule, fix = f"must be a whole number >= {least}", f"write for example {name}=2"
        raise JobError(where=where, field=name, value=value, rule=rule, fix=fix)
    if name == "zero" and number not in ZERO_STAGES:
        raise JobError(
            where=where,
            field=name,
            value=value,
            rule="is not known",
            fix=nearest(value, ("0", "1", "2", "3")),
        )


def _require_text(name: str, value: str, *, where: str) -> None:
    known = TEXTS[name]
    layers = whole_number(value.removeprefix("full:").removesuffix(FRACTION))
    if value in known or (name == "recompute" and value.startswith("full:") and layers):
        return
    if name == "cut" and value in {EVEN, BALANCED}:
        return
    if name == "schedule" and (value in RULES or ".py:" in value or value.endswith(".csv")):
        return
    raise JobError(where=where, field=name, value=value, rule="is not known", fix=nearest(value, known))

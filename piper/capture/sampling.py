"""Captures at the sizes that tell a family [Note: laws of capture]: what needs torch once per model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from piper.capture.assemble import Assembly
from piper.capture.choice import KernelChoice
from piper.capture.codec import to_json
from piper.capture.domain import Domain, one_length
from piper.capture.family import joined
from piper.capture.fresh import Captures, Subject
from piper.capture.known import Family, Found
from piper.capture.polynomial import IN_BATCH, IN_BOTH, IN_LENGTH, Fit, NotPolynomialError, Point, Terms
from piper.capture.records import ReplayMismatchError
from piper.capture.repeats import repeated_blocks
from piper.errors import ModelError
from piper.graph.captured import CapturedModel, PassCost

FIRST, SECOND = 2, 3
"""Microbatches that give a line: the smallest that torch does not treat apart (a size of 1 is broadcast)."""

LARGEST = 257
"""The largest microbatch of a family; prime, so that it meets no size of a model."""

PARABOLA = 3
"""Lengths that give a law; the others check it."""

MAX_OPERATORS = 2000
"""A module that runs more operators, repeats left out, is not captured at many lengths: it takes too long."""


def sample(
    source: Any, point: Point, *, name: str, dtype: str, kernels: KernelChoice, domain: Domain | None
) -> tuple[CapturedModel, list[Found]]:
    """Capture a model at one size, and look for families that hold it.

    Args:
        source: as in `piper.capture.capture`, no module.
        point: the size that is asked for.
        name: for messages.
        dtype: "fp32", "bf16" or "fp16".
        kernels: for which kernels.
        domain: the largest to try, around the size; None: capture only what is asked for.
    Returns: the capture, and what was found, the largest domain first.
    Raises: ModelError for what cannot be captured at the size itself.
    """
    subject = Subject(source, name=name, seq_len=point[1], dtype=dtype, kernels=kernels)
    try:
        return _sampled(Samples(source, subject, dedupe=True), point, domain)
    except ReplayMismatchError:
        return _sampled(Samples(source, subject, dedupe=False), point, domain)


def _sampled(samples: Samples, point: Point, domain: Domain | None) -> tuple[CapturedModel, list[Found]]:
    asked = samples.captures(point[1]).at(*point)
    if domain is None:
        return asked.model, []
    samples.put(point, asked)
    return asked.model, _families(samples, point, domain)


class Samples:
    """Captures of a model at several sizes, in the form that `joined` takes; each is made once.

    Args:
        source: builds the module for other lengths.
        subject: the module at the length that is asked for.
        dedupe: run repeated blocks once.
    """

    def __init__(self, source: Any, subject: Subject, *, dedupe: bool) -> None:
        self._source, self._subject = source, subject
        self._blocks = repeated_blocks(subject.module) if dedupe else []
        self._captures: dict[int, Captures] = {}
        self._found: dict[Point, dict[str, Any]] = {}

    def captures(self, seq_len: int) -> Captures:
        """Return the captures at one length."""
        if seq_len not in self._captures:
            self._captures[seq_len] = Captures(self._subject, blocks=self._blocks)
        return self._captures[seq_len]

    def put(self, point: Point, assembly: Assembly) -> None:
        """Take a capture as a sample."""
        self._found[point] = _detailed(assembly)

    def at(self, point: Point) -> dict[str, Any]:
        """Return one sample; it is compared with another microbatch that is no 1."""
        if point not in self._found:
            micro_batch, seq_len = point
            other = SECOND if micro_batch == FIRST else FIRST
            self.put(point, self.captures(seq_len).at(micro_batch, seq_len, other=other))
        return self._found[point]

    def same_module(self, seq_len: int) -> bool:
        """Return whether the module for another length has the same parameters and buffers."""
        subject = self._subject
        other = Subject(
            self._source, name=subject.name, seq_len=seq_len, dtype=subject.dtype, kernels=subject.kernels
        )
        return other.layout == subject.layout


def _families(samples: Samples, point: Point, domain: Domain) -> list[Found]:
    found: list[Found] = []
    if not domain.is_one_length and samples.captures(point[1]).num_operators <= MAX_OPERATORS:
        found.append(Found(domain=domain, families=_over_lengths(samples, point, domain)))
    if not any(one.families for one in found):
        found.append(Found(domain=one_length(point[1]), families=_over_batches(samples, point)))
    return found


def _over_lengths(samples: Samples, point: Point, domain: Domain) -> tuple[Family, ...]:
    """Return a family of all microbatches, or one of those from 2 on and one of 1, or none."""
    *others, here = domain.lengths(point[1])
    if not all(samples.same_module(end) for end in (domain.low, domain.high) if end != here):
        return ()
    fitted = [(b, length) for length in others[:PARABOLA] for b in (FIRST, SECOND)]
    checks = [(FIRST, length) for length in (*others[PARABOLA:], here)]
    checks.append((LARGEST, here))
    single = [(1, length) for length in (*others[PARABOLA:], here)]
    whole = _families_of(samples, IN_BOTH, (fitted, checks, single), point=point)
    if whole and whole[0].smallest > 1:
        shape = [(1, length) for length in others[:PARABOLA]]
        return (*whole, *_family(samples, IN_LENGTH, (shape, single), micro_batches=(1, 1)))
    return whole


def _over_batches(samples: Samples, point: Point) -> tuple[Family, ...]:
    here = point[1]
    fitted = [(FIRST, here), (SECOND, here)]
    return _families_of(samples, IN_BATCH, (fitted, [(LARGEST, here)], [(1, here)]), point=point)


def _families_of(
    samples: Samples, terms: Terms, parts: tuple[list[Point], list[Point], list[Point]], *, point: Point
) -> tuple[Family, ...]:
    """Return the family of all samples; if microbatches of 1 do not belong to it, that of the others.

    Args:
        samples: where captures come from.
        terms: of the polynomials.
        parts: points that determine them, points that check them, and those that check microbatches of 1.
        point: a further check.
    """
    fitted, checks, single = parts
    checks, single = [*checks, *_only(point, point[0] > 1)], [*single, *_only(point, point[0] == 1)]
    return _family(samples, terms, (fitted, [*checks, *single]), micro_batches=(1, LARGEST)) or _family(
        samples, terms, (fitted, checks), micro_batches=(FIRST, LARGEST)
    )


def _family(
    samples: Samples,
    terms: Terms,
    parts: tuple[list[Point], list[Point]],
    *,
    micro_batches: tuple[int, int],
) -> tuple[Family, ...]:
    """Return the family through some points that holds at others too, or nothing."""
    points = list(dict.fromkeys((*parts[0], *parts[1])))
    try:
        content = joined([samples.at(point) for point in points], Fit(terms, points))
    except (NotPolynomialError, ModelError, ReplayMismatchError):
        return ()
    return (Family(smallest=micro_batches[0], largest=micro_batches[1], content=content),)


def _only(point: Point, wanted: bool) -> list[Point]:
    return [point] if wanted else []


def _detailed(assembly: Assembly) -> dict[str, Any]:
    """Return a capture as `piper.capture.family.joined` takes it."""

    def of(cost: PassCost) -> tuple[Sequence[Any], list[Any]]:
        detail = assembly.details[id(cost)]
        return detail.operations, [detail.moments]

    return to_json(assembly.model, details=of)

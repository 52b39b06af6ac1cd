"""`Known`: what the cache knows of one model, and what would be worth finding out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from piper.capture.cache import cache_folder, cache_key, load, store
from piper.capture.codec import from_json, to_json
from piper.capture.collection import collection_paused
from piper.capture.domain import Domain, domains_of
from piper.capture.family import member
from piper.capture.polynomial import NotPolynomialError, Point
from piper.graph.captured import CapturedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family [Note: families] and the microbatches for which it holds, both included."""

    smallest: int
    largest: int
    content: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The families over a domain; none: it was looked for in vain."""

    domain: Domain
    families: tuple[Family, ...] = ()

    def family_of(self, point: Point) -> Family | None:
        """Return the family to which a size belongs."""
        held = (family for family in self.families if family.smallest <= point[0] <= family.largest)
        return next(held, None) if point[1] in self.domain else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the cache holds of a model.

    Args:
        folder: of the cache.
        key: of all that decides a capture, apart from its sizes.
        context_length, breaks: of `domains_of`.
    """

    folder: Path
    key: str
    context_length: int | None = None
    breaks: tuple[int, ...] = ()
    _read: dict[Domain, Found | None] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Any, *, cache_dir: str | os.PathLike[str] | None, options: tuple[str, ...]) -> Self:
        """Return what is known of a source.

        Args:
            source: may state its context and where lengths matter (`domains_of`).
            cache_dir: as in `piper.capture.capture`.
            options: all that decides a capture apart from its sizes, the source's fingerprint first.
        """
        return cls(
            folder=cache_folder(cache_dir),
            key=cache_key(*options),
            context_length=getattr(source, "context_length", None),
            breaks=tuple(getattr(source, "length_breaks", ())),
        )

    @collection_paused()
    def model_at(self, point: Point) -> CapturedModel | None:
        """Return the capture at one size: a member of a family, or one of its own; None: not known."""
        for domain in self._domains(point[1]):
            found = self._found(domain)
            family = found and found.family_of(point)
            if family:
                with suppress(NotPolynomialError):
                    return from_json(member(family.content, point))
        entry = load(self.folder, self._key_of("one", *point))
        return None if entry is None else from_json(entry)

    def domain_to_try(self, point: Point) -> Domain | None:
        """Return over which domain to look for a family that holds a size; None: that is known already."""
        domains = self._domains(point[1])
        found = [self._found(domain) for domain in domains]
        if any(one is not None and one.families for one in found):
            return None
        # The first domain is tried, and where it has no family, the last one.
        return next((domains[i] for i in (0, -1) if found[i] is None), None)

    def keep(self, model: CapturedModel, found: Sequence[Found]) -> None:
        """Write a capture, and what was found on the way."""
        point = model.micro_batch, model.seq_len
        for one in found:
            store(self.folder, self._key(one.domain), {"families": [asdict(f) for f in one.families]})
        if not any(one.family_of(point) for one in found):
            store(self.folder, self._key_of("one", *point), to_json(model))

    def _domains(self, seq_len: int) -> tuple[Domain, ...]:
        return domains_of(seq_len, context_length=self.context_length, breaks=self.breaks)

    def _found(self, domain: Domain) -> Found | None:
        if domain not in self._read:
            entry = load(self.folder, self._key(domain))
            families = tuple(Family(**family) for family in entry["families"]) if entry else ()
            self._read[domain] = Found(domain=domain, families=families) if entry else None
        return self._read[domain]

    def _key(self, domain: Domain) -> str:
        return self._key_of("family", domain.low, domain.high, domain.step)

    def _key_of(self, *parts: object) -> str:
        return hashlib.sha256(f"{self.key} {parts}".encode()).hexdigest()

"""`Candidate`: one strategy of a search, and the names of the dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from piper.strategy import Shorthand
from piper.strategy.cuts import EVEN

NO_NUMBER = 0
"""In a dimension of whole numbers: left to the default."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Candidate:
    """One point of the space, in canonical form: values that change nothing are set to one choice.

    The fields are the keys of the shorthand; 0 leaves hsdp, bucket_mb and prefetch to their defaults.
    """

    gpus: int
    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    hsdp: int = NO_NUMBER
    zero: int = 0
    sp: str = "on"
    schedule: str = "1f1b"
    recompute: str = "none"
    micro_batch: int = 1
    async_tp: str = "off"
    offload: str = "none"
    bucket_mb: int = NO_NUMBER
    prefetch: int = NO_NUMBER
    cut: str = EVEN

    @property
    def shorthand(self) -> Shorthand:
        """Return it as a strategy: what is said of one rank, or is a default, is left out."""

        def many(degree: int) -> int | None:
            return degree if degree > 1 else None

        return Shorthand(
            tp=many(self.tp),
            pp=self.pp,
            vp=many(self.vp),
            cp=many(self.cp),
            ep=many(self.ep),
            etp=many(self.etp),
            dp=self.dp,
            hsdp=self.hsdp or None,
            zero=self.zero,
            sp=self.sp if self.tp > 1 else None,
            schedule=self.schedule,
            recompute=self.recompute,
            micro_batch=self.micro_batch,
            async_tp=self.async_tp if self.async_tp == "on" else None,
            offload=self.offload if self.offload != "none" else None,
            bucket_mb=self.bucket_mb or None,
            prefetch=self.prefetch or None,
            cut=self.cut if self.cut != EVEN and self.pp > 1 else None,
        )

    @property
    def family(self) -> str:
        """Return what is said of it when it loses together with others."""
        return family_of(pp=self.pp, tp=self.tp, cp=self.cp, ep=self.ep, recompute=self.recompute)


DIMENSIONS = tuple(f.name for f in fields(Candidate))


def family_of(*, pp: int, tp: int, cp: int, ep: int, recompute: str) -> str:
    """Return the name of candidates that lose together."""
    degrees = {"pp": pp, "tp": tp, "cp": cp, "ep": ep}
    named = [f"{name}={size}" for name, size in degrees.items() if size > 1 or name == "pp"]
    return ",".join([*named, f"recompute={recompute}"])


def has_values(candidate: Candidate, wanted: Mapping[str, str]) -> bool:
    """Return whether dimensions of a candidate have the values, written as text."""
    return all(str(getattr(candidate, name)) == value for name, value in wanted.items())

"""`Domain`: over which sequence lengths the captures of a model may follow one law; free of torch.

[Note: laws of capture]
Over a domain every number of a capture is one polynomial in micro_batch and seq_len (`piper.capture.family`).
Lengths beyond the model's context have longer tables; a window of attention masks only longer sequences; and
some kernels round lengths up to 32 or more. So a domain ends at the context and at windows, and holds only
multiples of a power of two. That a law holds is not believed but tried, at its ends and between.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_STEP = 128
"""Kernels round to tiles of no more tokens (attention backward of CUDA: rows in tiles of 64 or 128)."""

SHORTEST = 13
"""Shorter sequences are captured one by one: their sizes meet those of heads, experts and the like."""

NUM_LENGTHS = 5
"""Lengths at which a law is tried: three give a parabola; whatever bends once between two others is seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """The multiples of `step` from `low` to `high`, both included."""

    low: int
    high: int
    step: int = 1

    @property
    def is_one_length(self) -> bool:
        """Return whether only the microbatch varies."""
        return self.low == self.high

    def __contains__(self, seq_len: int) -> bool:
        """Return whether a sequence length lies in the domain."""
        return self.low <= seq_len <= self.high and seq_len % self.step == 0

    def lengths(self, seq_len: int) -> tuple[int, ...]:
        """Return `NUM_LENGTHS` lengths to try, `seq_len` last; both ends are among them.

        Apart from the ends they are odd multiples of the step, in about geometric progression.
        """
        ratio, between = self.high / self.low, NUM_LENGTHS - 1
        inner = [self.low * ratio ** (i / between) for i in range(1, between)]
        odd = [int(length / self.step) // 2 * 2 * self.step + self.step for length in inner]
        found = dict.fromkeys((self.low, self.high, *odd))
        found.pop(seq_len, None)
        usable = [length for length in found if length in self]
        return (*usable[: NUM_LENGTHS - 1], seq_len)


def one_length(seq_len: int) -> Domain:
    """Return the domain of a single sequence length."""
    return Domain(low=seq_len, high=seq_len)


def domains_of(
    seq_len: int, *, context_length: int | None = None, breaks: Iterable[int] = ()
) -> tuple[Domain, ...]:
    """Return the domains around a sequence length that may follow one law, the best to try first.

    Args:
        seq_len: the length that is asked for.
        context_length: up to which length the module is the same; None: not known.
        breaks: lengths up to which the module runs one way, and beyond them another.
    """
    found: list[Domain] = []
    if context_length is not None and SHORTEST <= seq_len <= context_length:
        high = min((size for size in (*breaks, context_length) if size >= seq_len), default=context_length)
        low = max((size + 1 for size in (*breaks, SHORTEST - 1) if size < seq_len), default=SHORTEST)
        step = min(MAX_STEP, seq_len & -seq_len)
        while step:
            domain = Domain(low=-(-low // step) * step, high=high // step * step, step=step)
            if len(domain.lengths(seq_len)) == NUM_LENGTHS:
                found.append(domain)
            step //= 2
    return (*found, one_length(seq_len))

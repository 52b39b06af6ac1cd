"""Lower bounds of the passes of a step, for many ways of working at once.

[Note: admissible bounds]
A bound never exceeds what the simulator says. Between two norm barriers a rank waits until its first input
can be there (`head`), is taken for all its passes (`work`), and after its last backward the gradient must
get back to the first stage (`tail`). Passes may be cut in two: what follows the last input half on a rank
counts for the tail or for the work, not for both. Ranks are taken for less than the spans of their passes
by the exchanges that another microbatch may hide, and for more than their kernels by what exchanges beside
them slow (`piper.search.beside`); where passes overlap in a slot, only kernels count, and
launches do not: whole backwards have fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from piper.search.unit_costs import F, W

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chains:
    """What decides the bound of n ways of working over one cut, float64 [n, ranks], in ns.

    Args:
        head: before the first kernel of a rank.
        work: of a microbatch on a rank, all passes.
        inputs: of a microbatch, without the halves that nobody waits for.
        host: of a microbatch on a rank, to launch its tasks; no smaller for smaller microbatches.
        tail: after the last backward that a gradient comes from.
        hops: int64 [ranks], transfers in head and tail together.
    """

    head: Floats
    work: Floats
    inputs: Floats
    host: Floats
    tail: Floats
    hops: Ints

    def take(self, ways: Ints) -> Chains:
        """Return those of several ways of working, repeated as asked."""
        columns = {name: getattr(self, name)[ways] for name in ("head", "work", "inputs", "host", "tail")}
        return Chains(hops=self.hops, **columns)

    def bound_ns(
        self, microbatches: Floats, *, scale: Floats | float = 1.0, transfer_ns: Floats | float = 0.0
    ) -> Floats:
        """Return the bound of each way of working, float64 [n]: of the passes of one step.

        Args:
            microbatches: float64 [n].
            scale: float64 [n], on all times.
            transfer_ns: float64 [n], of one message to the next rank.
        """
        scale_, hop = np.asarray(scale)[..., None], np.asarray(transfer_ns)[..., None]
        number = microbatches[:, None]
        whole = scale_ * (self.head + number * self.work) + hop * (self.hops // 2)
        back = scale_ * (self.head + number * self.inputs + self.tail) + hop * self.hops
        return np.asarray(np.maximum(whole, back).max(axis=1))

    def launches_ns(self, microbatches: Floats) -> Floats:
        """Return what the host of the busiest rank launches in a step, float64 [n]: no step is shorter."""
        return np.asarray((microbatches[:, None] * self.host).max(axis=1))

    def busiest_ns(self, microbatches: Floats, *, scale: Floats | float = 1.0) -> Floats:
        """Return the same without a barrier between steps: what the busiest rank is taken for."""
        found = np.asarray(scale)[..., None] * microbatches[:, None] * self.work
        return np.asarray(found.max(axis=1))


def chains(
    *,
    span: Floats,
    lead: Floats,
    trail: Floats,
    busy: Floats,
    slowed: Floats,
    drain: Floats,
    host: Floats,
    pp: int,
    layout: str,
    overlaps: bool,
) -> Chains:
    """Return the chains of n ways of working.

    Args:
        span, lead, trail, busy, slowed, host: float64 [n, 3, stages].
        drain: float64 [n, stages].
        pp: pipeline ranks.
        layout: of a schedule: "loop", "v" or "bidirectional".
        overlaps: whether a slot may hold two passes.
    """
    taken = busy if overlaps else np.maximum(span - lead - trail, busy + slowed)
    forward = np.concatenate([np.zeros_like(span[:, F, :1]), np.cumsum(span[:, F], axis=1)], axis=1)
    backward = np.concatenate([np.zeros_like(drain[:, :1]), np.cumsum(drain, axis=1)], axis=1)
    of_rank = [_stages(rank, pp=pp, stages=span.shape[2], layout=layout) for rank in range(pp)]
    share = 0.5 if layout == "bidirectional" else 1.0
    work = np.stack([taken[:, :, stages].sum(axis=(1, 2)) for stages in of_rank], axis=1) * share
    halves = np.stack([taken[:, W, stages].sum(axis=1) for stages in of_rank], axis=1) * share
    nearest = [min(stages) for stages in of_rank]
    return Chains(
        head=forward[:, nearest],
        work=work,
        inputs=work - halves,
        host=np.stack([host[:, :, stages].sum(axis=(1, 2)) for stages in of_rank], axis=1) * (not overlaps),
        tail=backward[:, nearest],
        hops=np.array([2 * stage for stage in nearest], dtype=np.int64),
    )


def _stages(rank: int, *, pp: int, stages: int, layout: str) -> list[int]:
    """Return the stages of the model that a rank holds."""
    if layout == "bidirectional":
        return sorted({rank, pp - 1 - rank}) if stages == pp else [rank]
    if layout == "v":
        return [rank, 2 * pp - 1 - rank]
    return list(range(rank, stages, pp))

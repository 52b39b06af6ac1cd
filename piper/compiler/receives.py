"""Where receives are posted: one slot ahead of their use, in the order in which the other end sends.

[Note: receive gating]
A receive is dispatched one slot before the slot that needs it, and waits for the compute task before that:
it overlaps with one slot of compute, and few receives hold memory. Receives of one stream are posted in the
order in which the other end sends: one whose successor is needed earlier is posted earlier itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cost_models.errors import check_invariant
from piper.compiler.columns import Numbers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transfers:
    """The transfers of one edge and direction at one end: int64 [transfers] each.

    Args:
        edge: index in `Graph.crossings`.
        microbatches: theirs.
        tasks: their numbers.
        place: of sends, their dispatch keys; of receives, the slots that need them.
    """

    edge: int
    microbatches: Numbers
    tasks: Numbers
    place: Numbers


def posted(
    received: Sequence[Transfers], sent: Sequence[Transfers], *, num_microbatches: int
) -> tuple[Numbers, Numbers]:
    """Return receives (task numbers, in the order of the sends) and the slot in which each is posted."""
    sends, senders, keys = _flat(sent, num_microbatches)
    receives, tasks, slots = _flat(received, num_microbatches)
    known = np.argsort(receives)
    check_invariant(
        bool(np.array_equal(receives[known], np.sort(sends))),
        "the two ends of a pair of pipeline ranks transfer different tensors",
    )
    sends = sends[np.lexsort((senders, keys))]
    order = known[np.searchsorted(receives[known], sends)]
    ahead = slots[order] - 1
    return tasks[order], np.maximum(np.minimum.accumulate(ahead[::-1])[::-1], 0)


def _flat(transfers: Sequence[Transfers], num_microbatches: int) -> tuple[Numbers, Numbers, Numbers]:
    """Return identity (edge x microbatches + microbatch), task numbers and places of transfers."""
    identity = [t.edge * num_microbatches + t.microbatches for t in transfers]
    return (
        np.concatenate(identity),
        np.concatenate([t.tasks for t in transfers]),
        np.concatenate([t.place for t in transfers]),
    )

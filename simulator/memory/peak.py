"""The peak of a memory curve: when, how much, of which classes, and who owns it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.plan import DevicePlan, MemoryClass
from simulator.timeline.timeline import RankTrack


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The first moment at which a rank's allocated bytes are largest.

    Args:
        time_ns: when.
        total_bytes: allocated bytes.
        class_bytes: bytes by `MemoryClass`; they sum to `total_bytes`.
    """

    time_ns: int
    total_bytes: int
    class_bytes: tuple[int, ...]

    def by_name(self) -> dict[str, int]:
        """Return bytes by class name, as `memory_by_class_bytes` reports them."""
        return {kind.name.lower(): self.class_bytes[kind] for kind in MemoryClass}


def peak_of(track: RankTrack) -> Peak:
    """Return the peak of a track's memory curve."""
    totals = np.einsum("ic->i", track.memory_bytes)
    at = int(np.argmax(totals))
    return Peak(
        time_ns=int(track.memory_ns[at]),
        total_bytes=int(totals[at]),
        class_bytes=tuple(track.memory_bytes[at].tolist()),
    )


def owners_at(device: DevicePlan, track: RankTrack, *, time_ns: int) -> list[tuple[str, int]]:
    """Return (owner, bytes) of everything alive at `time_ns`, the largest first."""
    table = device.buffers
    alive = np.where(table.persistent, 1, 0)
    for lists, times, sign in (
        (device.tasks.allocates, track.start_ns, 1),
        (device.tasks.frees, track.end_ns, -1),
    ):
        tasks = np.repeat(np.arange(len(lists.starts) - 1), np.diff(lists.starts))
        happened = (times.reshape(-1, len(device.tasks)) <= time_ns).sum(axis=0)
        np.add.at(alive, lists.values, sign * happened[tasks])
    found = [(table.owner_of(i), int(table.size_bytes[i])) for i in np.flatnonzero(alive > 0).tolist()]
    return sorted((row for row in found if row[1]), key=lambda row: (-row[1], row[0]))

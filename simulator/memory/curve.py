"""Memory curve: buffers that tasks allocate (at their start) and free (at their end) -> bytes over time.

[Note: memory at one instant]  What completes at a nanosecond is freed before what starts there is
    allocated, as in the caching allocator of one stream, so a curve holds one value per instant.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simulator.errors import IllegalPlanError
from simulator.plan import DevicePlan, IndexLists, MemoryClass

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryCurve:
    """Bytes over time.

    Args:
        time_ns: int64 [changes], rising, from 0.
        class_bytes: int64 [changes, classes], bytes by `MemoryClass` from that time on.
    """

    time_ns: Ints
    class_bytes: Ints


def memory_curve(
    device: DevicePlan, *, start_ns: Ints, end_ns: Ints, sizes: Ints | None = None
) -> MemoryCurve:
    """Return the curve of one device plan.

    Args:
        device: whose buffers.
        start_ns, end_ns: int64 [steps, tasks], when its tasks ran.
        sizes: int64 [buffers], instead of the buffers' own sizes (what an allocator makes of them).

    Raises: IllegalPlanError if a buffer is freed that is not alive, or a persistent one is allocated.
    """
    table = device.buffers
    size = table.size_bytes if sizes is None else sizes
    taken, taken_ns = _events(device.tasks.allocates, start_ns)
    given, given_ns = _events(device.tasks.frees, end_ns)
    _require_not_persistent(device, np.concatenate([taken, given]))
    time_ns, at = np.unique(np.concatenate([np.zeros(1, np.int64), taken_ns, given_ns]), return_inverse=True)
    change = np.zeros((len(time_ns), len(MemoryClass)), dtype=np.int64)
    kinds = table.memory_class.astype(np.int64)
    buffers = np.concatenate([taken, given])
    signed = np.concatenate([size[taken], -size[given]])
    np.add.at(change, (at[1:], kinds[buffers]), signed)
    np.add.at(change[0], kinds[table.persistent], size[table.persistent])
    class_bytes = np.cumsum(change, axis=0)
    _require_alive(device, class_bytes)
    changed = np.concatenate([np.ones(1, np.bool_), (np.diff(class_bytes, axis=0) != 0).any(axis=1)])
    return MemoryCurve(time_ns=time_ns[changed], class_bytes=class_bytes[changed])


def _events(lists: IndexLists, times: Ints) -> tuple[Ints, Ints]:
    """Return (buffer, time) of every entry of `lists`, step after step."""
    tasks = np.repeat(np.arange(len(lists.starts) - 1), np.diff(lists.starts))
    return np.tile(lists.values, len(times)), times[:, tasks].ravel()


def _require_not_persistent(device: DevicePlan, buffers: Ints) -> None:
    wrong = buffers[device.buffers.persistent[buffers]]
    if len(wrong):
        owner = device.buffers.owner_of(int(wrong[0]))
        text = (
            f"pipeline rank {device.pipeline_rank}: a task allocates or frees the persistent buffer {owner!r}"
        )
        raise IllegalPlanError(where="plan", violations=[text])


def _require_alive(device: DevicePlan, class_bytes: Ints) -> None:
    if (class_bytes < 0).any():
        kind = MemoryClass(int(np.argwhere(class_bytes < 0)[0][1])).name.lower()
        text = f"pipeline rank {device.pipeline_rank}: a buffer of class {kind} is freed that is not alive"
        raise IllegalPlanError(where="plan", violations=[text])

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
    kinds = table.memory_class.astype(np.int64)
    taken, given = device.tasks.allocates, device.tasks.frees
    touched = np.concatenate([taken.values, given.values])
    _require_not_persistent(device, touched)
    classes = np.flatnonzero(np.bincount(kinds[touched], minlength=len(MemoryClass)))
    up, down = (_by_task(lists, kinds, size, classes=classes) for lists in (taken, given))
    begins, ends = np.flatnonzero(up.any(axis=0)), np.flatnonzero(down.any(axis=0))
    times = np.concatenate([start_ns[:, begins].ravel(), end_ns[:, ends].ravel()])
    order = np.argsort(times)
    times = times[order]
    last = np.flatnonzero(np.append(times[1:] != times[:-1], True)[: len(times)])
    change = np.concatenate(
        [np.tile(up[:, begins], len(start_ns)), np.tile(-down[:, ends], len(start_ns))], axis=1
    )
    held = np.stack([np.cumsum(row[order])[last] for row in change]) if len(change) else change
    return _curve(device, times[last], held, classes=classes, size=size)


def _by_task(lists: IndexLists, kinds: Ints, size: Ints, *, classes: Ints) -> Ints:
    """Return the bytes of some classes that each task takes or gives back, int64 [classes, tasks]."""
    num_tasks = len(lists.starts) - 1
    tasks = np.repeat(np.arange(num_tasks), np.diff(lists.starts))
    row = np.searchsorted(classes, np.arange(len(MemoryClass)))[kinds[lists.values]]
    found = np.zeros(len(classes) * num_tasks, dtype=np.int64)
    np.add.at(found, row * num_tasks + tasks, size[lists.values])
    return found.reshape(len(classes), num_tasks)


def _curve(device: DevicePlan, time_ns: Ints, held: Ints, *, classes: Ints, size: Ints) -> MemoryCurve:
    """Add what stays to what tasks hold, int64 [classes, changes], and leave out what changes nothing."""
    lasting = device.buffers.persistent
    stays = np.zeros(len(MemoryClass), dtype=np.int64)
    np.add.at(stays, device.buffers.memory_class[lasting].astype(np.int64), size[lasting])
    if not len(time_ns) or time_ns[0]:
        time_ns, held = np.insert(time_ns, 0, 0), np.insert(held, 0, 0, axis=1)
    changed = np.append(True, (held[:, 1:] != held[:, :-1]).any(axis=0))
    class_bytes = np.repeat(stays[None], np.count_nonzero(changed), axis=0)
    for kind, row in zip(classes.tolist(), held, strict=True):
        class_bytes[:, kind] += row[changed]
    _require_alive(device, class_bytes)
    return MemoryCurve(time_ns=time_ns[changed], class_bytes=class_bytes)


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

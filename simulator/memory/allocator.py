"""Allocator model: what PyTorch's caching allocator reserves for the buffers of a device over time.

[Note: what the allocator is asked for]  Persistent buffers are asked for first, in the order of the table,
    on the first stream; every other buffer when a task that allocates it starts, in the pool of that task's
    stream. It is freed when the task that frees it ends, on whatever stream that is: as if the event that
    `record_stream` waits for were seen at once. A buffer is one request: what is only known as the peak of
    a task's workspace, or as the sum of what a microbatch keeps, is one block of that size. What ends at an
    instant is freed before what starts there is allocated ([Note: memory at one instant]).
Rules of the allocator: [Note: caching allocator] in `blocks.py`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.memory import blocks
from simulator.memory.blocks import MIN_BLOCK_BYTES
from simulator.plan import DevicePlan, IndexLists

MANY_EVENTS = 20_000
"""Events from which on it pays to load numba for them."""
UNLIMITED = 1 << 62
NEVER = 1 << 62
"""The end of what is still there after the last step."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AllocatorRun:
    """What the allocator of one device did. An *instance* is one allocation of a buffer.

    Args:
        events: int64 [events], in order: i allocates instance i, -1 - i frees it.
        time_ns: int64 [events].
        reserved_bytes: int64 [events], bytes of all segments after each event.
        buffer, task, stream: int64 [instances]: row in the buffer table, the allocating task (-1: none,
            persistent), and whose pool it is from.
        size_bytes: int64 [instances], rounded.
        address: int64 [instances].
        retries: how often cached segments were given back since the device was full.
    """

    events: Ints
    time_ns: Ints
    reserved_bytes: Ints
    buffer: Ints
    task: Ints
    stream: Ints
    size_bytes: Ints
    address: Ints
    retries: int

    @property
    def allocated_bytes(self) -> Ints:
        """Return the bytes of the blocks in use after each event, int64 [events], rounded to 512 B."""
        change = np.where(self.events >= 0, self.size_bytes[self.events], -self.size_bytes[-1 - self.events])
        return np.cumsum(change, dtype=np.int64)

    @property
    def reserved_peak_bytes(self) -> int:
        """Return the most bytes that were reserved."""
        return int(self.reserved_bytes.max(initial=0))


def rounded_bytes(size_bytes: Ints) -> Ints:
    """Return what each buffer takes of a segment: multiples of 512 B; nothing for 0 B."""
    rounded: Ints = (size_bytes + MIN_BLOCK_BYTES - 1) // MIN_BLOCK_BYTES * MIN_BLOCK_BYTES
    return rounded


def run_allocator(
    device: DevicePlan,
    *,
    start_ns: Ints,
    end_ns: Ints,
    expandable_segments: bool = False,
    capacity_bytes: int = UNLIMITED,
) -> AllocatorRun:
    """Let the allocator serve the buffers of `device`.

    Args:
        start_ns, end_ns: int64 [steps, tasks], when its tasks ran.
        expandable_segments: as in `PYTORCH_CUDA_ALLOC_CONF`; [Note: expandable segments].
        capacity_bytes: what may be reserved before cached segments are given back.
    """
    table = device.buffers
    lasting = np.flatnonzero(table.persistent)
    taken, taken_by, taken_ns = _entries(device.tasks.allocates, start_ns)
    given, _, given_ns = _entries(device.tasks.frees, end_ns)
    buffer = np.concatenate([lasting, taken])
    task = np.concatenate([np.full(len(lasting), -1, dtype=np.int64), taken_by])
    stream = np.where(task < 0, 0, device.tasks.stream[task].astype(np.int64)) if len(task) else task
    begin = np.concatenate([np.zeros(len(lasting), dtype=np.int64), taken_ns])
    end = np.full(len(buffer), NEVER, dtype=np.int64)
    end[len(lasting) :] = _ends(taken, taken_ns, given=given, given_ns=given_ns)
    size = rounded_bytes(table.size_bytes[buffer])
    events, time_ns = _in_order(begin, end)
    address, reserved, retries = _serve(events, size, stream, options=(expandable_segments, capacity_bytes))
    return AllocatorRun(
        events=events, time_ns=time_ns, reserved_bytes=reserved, buffer=buffer, task=task, stream=stream,
        size_bytes=size, address=address, retries=retries,
    )  # fmt: skip


def reserved_peak_bytes(
    device: DevicePlan,
    *,
    start_ns: Ints,
    end_ns: Ints,
    expandable_segments: bool = False,
    capacity_bytes: int = UNLIMITED,
) -> int:
    """Return the most bytes that the allocator reserves; arguments as in `run_allocator`."""
    run = run_allocator(
        device,
        start_ns=start_ns,
        end_ns=end_ns,
        expandable_segments=expandable_segments,
        capacity_bytes=capacity_bytes,
    )
    return run.reserved_peak_bytes


def _entries(lists: IndexLists, times: Ints) -> tuple[Ints, Ints, Ints]:
    """Return (buffer, task, time) of every entry of `lists`, step after step."""
    tasks = np.repeat(np.arange(len(lists.starts) - 1), np.diff(lists.starts))
    buffers = np.tile(lists.values.astype(np.int64), len(times))
    return buffers, np.tile(tasks, len(times)), times[:, tasks].ravel()


def _ends(taken: Ints, taken_ns: Ints, *, given: Ints, given_ns: Ints) -> Ints:
    """Return when each allocation is freed: the k-th of a buffer by the k-th free of it, or NEVER."""
    most = int(max(taken.max(initial=0), given.max(initial=0))) + 1
    frees = np.bincount(given, minlength=most)
    first_taken, first_given = (np.cumsum(n) - n for n in (np.bincount(taken, minlength=most), frees))
    first, second = _by_buffer(taken, taken_ns), _by_buffer(given, given_ns)
    buffer = taken[first]
    turn = np.arange(len(taken)) - first_taken[buffer]
    known = turn < frees[buffer]
    ends = np.full(len(taken), NEVER, dtype=np.int64)
    ends[first[known]] = given_ns[second[(first_given[buffer] + turn)[known]]]
    return np.maximum(ends, taken_ns)


def _by_buffer(buffer: Ints, time_ns: Ints) -> Ints:
    """Return the order of entries by buffer and time; those of one buffer mostly come in order of time."""
    order = _sorted(buffer)
    ordered, times = buffer[order], time_ns[order]
    if ((ordered[1:] == ordered[:-1]) & (times[1:] < times[:-1])).any():
        return np.lexsort((time_ns, buffer))
    return order


def _in_order(begin: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Return events and their times: at one instant frees, allocations, frees of what lived no time."""
    freed = np.flatnonzero(end < NEVER)
    instances = np.arange(len(begin), dtype=np.int64)
    events = np.concatenate([instances, -1 - freed])
    times = np.concatenate([begin, end[freed]])
    turn = np.concatenate([np.ones(len(begin), dtype=np.int64), np.where(end[freed] > begin[freed], 0, 2)])
    order = _sorted(times, turn)
    return events[order], times[order]


def _sorted(*keys: Ints) -> Ints:
    """Return the stable order by keys >= 0, the first counting most: packed into one number if they fit."""
    bits = [int(key.max(initial=0)).bit_length() for key in keys]
    place = np.arange(len(keys[0]))
    width = len(place).bit_length()
    if sum(bits) + width >= np.iinfo(np.int64).bits:
        return np.lexsort(keys[::-1])
    packed = np.zeros(len(place), dtype=np.int64)
    for key, shift in zip(keys, bits, strict=True):
        packed = packed << shift | key
    found: Ints = np.sort(packed << width | place) & ((1 << width) - 1)
    return found


def _serve(events: Ints, size: Ints, stream: Ints, *, options: tuple[bool, int]) -> tuple[Ints, Ints, int]:
    """Return addresses by instance, reserved bytes by event, and retries."""
    pools = 2 * (int(stream.max(initial=0)) + 1)
    columns = [np.zeros(len(size), dtype=np.int64), np.zeros(len(events), dtype=np.int64)]
    columns += [np.zeros(len(size), dtype=np.int64)]
    block = np.zeros(blocks.ROW * (2 * len(size) + 1), dtype=np.int64)
    free = np.zeros(2 * len(size) + 1, dtype=np.int64)
    count = np.array([0, blocks.NOTHING, 0], dtype=np.int64)
    ends = [free, count, np.full(pools, blocks.NOTHING, dtype=np.int64)]
    worth = len(events) >= MANY_EVENTS or "simulator.engines.fast.kernel" in sys.modules
    if worth and find_spec("numba") is not None:
        retries = blocks.compiled()(events, size, stream, *options, *columns, block, *ends)
        return columns[0], columns[1], int(retries)
    lists: Any = [column.tolist() for column in columns]
    place: Any = blocks.place
    retries = place(
        events.tolist(), size.tolist(), stream.tolist(), *options, *lists,
        block.tolist(), *[column.tolist() for column in ends],
    )  # fmt: skip
    return np.array(lists[0], dtype=np.int64), np.array(lists[1], dtype=np.int64), retries

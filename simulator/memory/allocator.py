"""Allocator model, first part: what a caching allocator reserves for buffers of given sizes.

Sources: PyTorch `c10/cuda/CUDACachingAllocator.cpp` (v2.x): kMinBlockSize = 512 B, to which every request
is rounded; requests above kSmallSize = 1 MiB are cut from segments that are multiples of kRoundLarge =
2 MiB. Fragmentation and the packing of small blocks into 2 MiB segments are not modelled: reserved bytes
are the peak of the rounded sizes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from simulator.memory.curve import memory_curve
from simulator.plan import DevicePlan

MIN_BLOCK_BYTES = 512
SMALL_BYTES = 1 << 20
LARGE_BLOCK_BYTES = 2 << 20

Ints = npt.NDArray[np.int64]


def rounded_bytes(size_bytes: Ints) -> Ints:
    """Return what each buffer occupies: multiples of 512 B, above 1 MiB of 2 MiB; nothing for 0 B."""
    block = np.where(size_bytes > SMALL_BYTES, LARGE_BLOCK_BYTES, MIN_BLOCK_BYTES)
    rounded: Ints = (size_bytes + block - 1) // block * block
    return rounded


def reserved_peak_bytes(device: DevicePlan, *, start_ns: Ints, end_ns: Ints) -> int:
    """Return the peak of the rounded sizes; times are int64 [steps, tasks]."""
    rounded = rounded_bytes(device.buffers.size_bytes)
    curve = memory_curve(device, start_ns=start_ns, end_ns=end_ns, sizes=rounded)
    return int(np.einsum("ic->i", curve.class_bytes).max())

"""Memory of a device over time: from buffer lifetimes to allocated and reserved bytes."""

from simulator.memory.allocator import AllocatorRun, reserved_peak_bytes, rounded_bytes, run_allocator
from simulator.memory.curve import MemoryCurve, memory_curve
from simulator.memory.peak import Peak, owners_at, peak_of

__all__ = [
    "AllocatorRun",
    "MemoryCurve",
    "Peak",
    "memory_curve",
    "owners_at",
    "peak_of",
    "reserved_peak_bytes",
    "rounded_bytes",
    "run_allocator",
]

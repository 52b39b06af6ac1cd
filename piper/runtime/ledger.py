"""Live bytes of a rank by memory class, counted by storage: what tensors share is counted once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from time import perf_counter_ns

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from piper.errors import RunFailedError
from simulator.plan import MemoryClass


class Ledger:
    """Counts storages that somebody holds; used by all streams of a rank.

    Transient tensors inside an operation are not seen; what is kept between operations is.

    Args of the log: (time, bytes by class) whenever `mark` finds a change.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.log: list[tuple[int, tuple[int, ...]]] = []
        self._totals = [0] * len(MemoryClass)
        self._held: dict[int, tuple[int, MemoryClass, int]] = {}
        self._lock = Lock()

    def hold(self, tensor: Tensor, kind: MemoryClass) -> int:
        """Count one more holder of a tensor's storage; return the key to release it with."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        with self._lock:
            holders, first_kind, size = self._held.get(key, (0, kind, storage.nbytes()))
            if holders == 0:
                self._totals[kind] += size
                self.peak_bytes = max(self.peak_bytes, sum(self._totals))
            self._held[key] = (holders + 1, first_kind, size)
        return key

    def release(self, key: int) -> None:
        """Give up one hold; the bytes are gone with the last."""
        with self._lock:
            holders, kind, size = self._held.pop(key)
            if holders > 1:
                self._held[key] = (holders - 1, kind, size)
            else:
                self._totals[kind] -= size

    def mark(self) -> None:
        """Note the time if anything changed since the last mark."""
        with self._lock:
            totals = tuple(self._totals)
            if not self.log or self.log[-1][1] != totals:
                self.log.append((perf_counter_ns(), totals))

    @contextmanager
    def saved(self) -> Iterator[list[int]]:
        """Hold what autograd saves inside the block (parameters are held already and cost nothing more)."""
        keys: list[int] = []

        def pack(tensor: Tensor) -> tuple[Tensor, int]:
            keys.append(self.hold(tensor, MemoryClass.ACTIVATIONS))
            # Detached: a node that keeps its own output would keep itself alive.
            return tensor.detach(), tensor._version

        with saved_tensors_hooks(pack, _unpack):
            yield keys


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    """Return a saved tensor; hooks switch autograd's own check of overwritten tensors off, so we make it."""
    tensor, version = packed
    if tensor._version != version:
        raise RunFailedError(
            f"a tensor of shape {list(tensor.shape)} that backward needs was overwritten in place"
        )
    return tensor

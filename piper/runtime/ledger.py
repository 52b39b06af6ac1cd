"""Live bytes of a rank by memory class, counted by storage: what tensors share is counted once.

[Note: bytes of a task]
A task is charged with the bytes that it holds and credited with those that it releases: their difference by
class is what is allocated after the task more than before it. It does not depend on what other streams do at
the same time, so it can be held against the buffers that the plan lets the task allocate and free. What a
task makes and throws away is not in it. Data waits on the host: the batch of a step is nobody's bytes, the
copy that a forward takes of it is.

[Note: steps alike]
Where the bytes of every task were the same in two steps, the plan and the model leave nothing to measure:
further steps count no tensors and take over what is known of each task. Watching what autograd saves costs a
tenth of a step of small layers (`benchmarks/runtime_parity.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import RLock, local
from time import perf_counter_ns

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from piper.errors import RunFailedError
from simulator.plan import MemoryClass

Elsewhere = Callable[[Tensor], Callable[[], Tensor] | None]


def nowhere(_tensor: Tensor) -> None:
    """Say of every tensor that it must be kept."""


NOT_COUNTED = -1
"""Key of what is held in a task that is not measured."""


class Ledger:
    """Counts storages that somebody holds; used by all streams of a rank.

    Transient tensors inside an operation are not seen; what is kept between operations is.

    Args:
        counts: whether anything is counted at all.

    Args of the log: (time, bytes by class) whenever `mark` finds a change.
    """

    def __init__(self, *, counts: bool = True) -> None:
        self._counts = counts
        self.peak_bytes = 0
        self.log: list[tuple[int, tuple[int, ...]]] = []
        self._totals = [0] * len(MemoryClass)
        self._held: dict[int, tuple[int, MemoryClass, int]] = {}
        self._lock = RLock()  # a release may come in the middle of a hold, from the garbage collector
        self._of_thread = local()

    @property
    def totals(self) -> tuple[int, ...]:
        """Return what is held now, by class."""
        with self._lock:
            return tuple(self._totals)

    @property
    def is_counting(self) -> bool:
        """Return whether this thread's task is measured [Note: steps alike]."""
        return self._counts and not getattr(self._of_thread, "knows", False)

    @contextmanager
    def task(self, known: Sequence[int] | None = None) -> Iterator[list[int]]:
        """Yield the bytes by class that this thread holds inside the block, less those that it releases.

        With `known` nothing is counted: these are the bytes [Note: steps alike].
        """
        if known is None:
            change = self._of_thread.change = [0] * len(MemoryClass)
            try:
                yield change
            finally:
                del self._of_thread.change
            return
        self._of_thread.knows = True
        try:
            yield list(known)
        finally:
            self._of_thread.knows = False
        with self._lock:
            self._totals = [total + size for total, size in zip(self._totals, known, strict=True)]

    def hold(self, tensor: Tensor, kind: MemoryClass) -> int:
        """Count one more holder of a tensor's storage; return the key to release it with."""
        if not self.is_counting:
            return NOT_COUNTED
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        with self._lock:
            holders, first_kind, size = self._held.get(key, (0, kind, storage.nbytes()))
            if holders == 0:
                self._add(kind, size)
                self.peak_bytes = max(self.peak_bytes, sum(self._totals))
            self._held[key] = (holders + 1, first_kind, size)
        return key

    def release(self, key: int) -> None:
        """Give up one hold; the bytes are gone with the last."""
        if key == NOT_COUNTED or not self.is_counting:
            return
        with self._lock:
            holders, kind, size = self._held.pop(key)
            if holders > 1:
                self._held[key] = (holders - 1, kind, size)
            else:
                self._add(kind, -size)

    def _add(self, kind: MemoryClass, size: int) -> None:
        self._totals[kind] += size
        change = getattr(self._of_thread, "change", None)
        if change is not None:
            change[kind] += size

    def mark(self) -> None:
        """Note the time if anything changed since the last mark."""
        with self._lock:
            totals = tuple(self._totals)
            if not self.log or self.log[-1][1] != totals:
                self.log.append((perf_counter_ns(), totals))

    @contextmanager
    def saved(self, elsewhere: Elsewhere = nowhere, found: list[Saved] | None = None) -> Iterator[None]:
        """Hold what autograd saves inside the block (parameters are held already and cost nothing more).

        Args:
            elsewhere: returns where the memory of a tensor that is not kept comes from in B, or None.
            found: takes what is held, in order.
        """

        def pack(tensor: Tensor) -> Saved | _Deferred:
            fetch = elsewhere(tensor)
            if fetch is not None:
                return _Deferred(fetch, tensor)
            saved = Saved(self, tensor)
            if found is not None:
                found.append(saved)
            return saved

        with saved_tensors_hooks(pack, lambda saved: saved.unpack()):
            yield


class _Deferred:
    """A view of a tensor that is made again before B needs it, contiguous as it was."""

    __slots__ = ("_fetch", "_layout")

    def __init__(self, fetch: Callable[[], Tensor], tensor: Tensor) -> None:
        self._fetch = fetch
        self._layout = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def unpack(self) -> Tensor:
        """Return the view of what was made again."""
        shape, stride, offset = self._layout
        with _disable_current_modes():  # a view of ours, and no operator of the backward
            return self._fetch().as_strided(shape, stride, offset)


class Saved:
    """A tensor as autograd keeps it: held until autograd drops it, in the middle of a backward.

    Released before the memory is free: another tensor may get the same address, which is the ledger's key.
    Meanwhile its memory may go away and come back ([Note: what goes away]).
    """

    __slots__ = ("_held", "_layout", "_ledger", "_tensor", "_version", "address")

    def __init__(self, ledger: Ledger, tensor: Tensor) -> None:
        self._ledger = ledger
        self._layout = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        self._tensor: Tensor | None = None
        self.come_back(tensor)

    def __del__(self) -> None:
        if self._tensor is not None:
            self._ledger.release(self._held)

    @property
    def tensor(self) -> Tensor:
        """Return the tensor, which must be there."""
        if self._tensor is None:
            raise RunFailedError(f"a tensor of shape {list(self._layout[1])} that backward needs is away")
        return self._tensor

    @property
    def is_away(self) -> bool:
        """Return whether its memory was given up."""
        return self._tensor is None

    def leave(self) -> None:
        """Give the memory up."""
        if self._tensor is not None:
            self._ledger.release(self._held)
            self._tensor = None

    def come_back(self, tensor: Tensor) -> None:
        """Take an equal tensor."""
        self._held = self.address = self._ledger.hold(tensor, MemoryClass.ACTIVATIONS)
        # Detached: a node that keeps its own output would keep itself alive.
        self._tensor, self._version = tensor.detach(), tensor._version

    def come_back_in(self, memory: UntypedStorage) -> None:
        """Take memory with the same contents."""
        dtype, shape, stride, offset = self._layout
        empty = torch.empty(0, dtype=dtype)
        self.come_back(empty.set_(memory, offset, shape, stride))

    def unpack(self) -> Tensor:
        """Return the tensor; hooks switch autograd's own check of overwritten tensors off, so we make it."""
        if self.tensor._version != self._version:
            raise RunFailedError(
                f"a tensor of shape {list(self.tensor.shape)} that backward needs was overwritten in place"
            )
        return self.tensor

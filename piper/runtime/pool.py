"""Memory of buffers that come and go in every microbatch, used again instead of being given back."""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor


class Pool:
    """Flat tensors by size and dtype; bounded by what the plan lets live at one time.

    Memory that the system gives anew must be mapped page by page, which costs as much as a pass over it.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._lock = Lock()

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of unknown values, [numel]."""
        with self._lock:
            free = self._free.get((numel, dtype))
            return free.pop() if free else torch.empty(numel, dtype=dtype)

    def give(self, tensor: Tensor) -> None:
        """Take a tensor back that nobody reads any more."""
        with self._lock:
            self._free.setdefault((tensor.numel(), tensor.dtype), []).append(tensor)

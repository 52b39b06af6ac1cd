"""Memory of buffers that come and go in every microbatch, used again instead of being given back."""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

from piper.runtime.devices.device import Device, Mark


class Pool:
    """Flat tensors by size and dtype; bounded by what the plan lets live at one time.

    Memory that the system gives anew must be mapped page by page, which costs as much as a pass over it.

    Args:
        device: where they are. What a stream takes, it writes after the stream that gave it back has read it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: dict[tuple[int, torch.dtype], list[tuple[Tensor, Mark]]] = {}
        self._lock = Lock()

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of unknown values, [numel]."""
        with self._lock:
            free = self._free.get((numel, dtype))
            tensor, given = free.pop() if free else (None, None)
        if tensor is None:
            return torch.empty(numel, dtype=dtype, device=self._device.place)
        self._device.wait(given)
        return tensor

    def give(self, tensor: Tensor) -> None:
        """Take a tensor back that nobody reads any more."""
        given = self._device.mark()
        with self._lock:
            self._free.setdefault((tensor.numel(), tensor.dtype), []).append((tensor, given))

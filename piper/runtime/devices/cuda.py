"""A rank on one GPU: a CUDA stream for each stream of the plan, NCCL between ranks.

[Note: one host thread]
Two NCCL operations on one device need not progress side by side, so that ranks that launch operations of
several communicators in different orders may wait for each other for ever. One thread therefore launches
everything in the plan's dispatch order, which the checker has found free of circular waits.

[Note: communicators at once]
A communicator that NCCL makes at its first use blocks until all its ranks come to that use, which interleaved
pipelines do in different orders. So each is made when its group is created (`device_id`), and warmed up by
one sum, in the same order on all ranks.
"""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from piper.errors import RunFailedError
from piper.runtime.devices.device import Mark

_LOOK_S = 5e-5

_MOST_CONNECTIONS = "32"
"""Hardware queues, 1 to 32 (CUDA C++ Programming Guide): streams that share one wait for each other."""


class CudaDevice:
    """Streams, events and communicators of one GPU.

    Args:
        index: of the GPU in this process (torchrun's LOCAL_RANK).
        priorities: stream name -> how urgent it is; higher wins, as in the plan.
    """

    name = "cuda"
    threads = False
    counts_bytes = False

    def __init__(self, index: int, priorities: dict[str, int]) -> None:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", _MOST_CONNECTIONS)
        torch.cuda.set_device(index)
        self.place = torch.device("cuda", index)
        self._priorities = priorities
        self._streams: dict[str, Any] = {}
        self._origin = self.mark()
        self._origin.synchronize()
        self._origin_ns = time.perf_counter_ns()

    def on_stream(self, name: str) -> AbstractContextManager[Any]:
        """Make a CUDA stream the current one; each is created at its first use."""
        if name not in self._streams:
            # torch counts the other way round, and takes what is out of the device's range to its ends.
            stream: Any = torch.cuda.Stream
            self._streams[name] = stream(self.place, priority=-self._priorities.get(name, 0))
        return torch.cuda.stream(self._streams[name])

    def mark(self) -> Mark:
        """Record an event."""
        kind: Any = torch.cuda.Event
        event = kind(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: Mark) -> None:
        """Let the current stream wait for an event."""
        torch.cuda.current_stream().wait_event(mark)

    def reach(self, mark: Mark, *, limit_s: float) -> None:
        """Look at an event until it is reached: a peer that died must not keep us for ever."""
        end = time.monotonic() + limit_s
        while not mark.query():
            if time.monotonic() > end:
                raise RunFailedError(f"the device did not come to the end of a task in {limit_s:g} s")
            time.sleep(_LOOK_S)

    def ns(self, mark: Mark) -> int:
        """Return the host's time at an event, by the time since one event that the host has seen."""
        return int(self._origin_ns + round(self._origin.elapsed_time(mark) * 1e6))

    def used_here(self, tensor: Tensor) -> None:
        """Keep the allocator from giving memory away before the current stream has read it."""
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream())

    def group(self, members: list[int], *, timeout: timedelta) -> dist.ProcessGroup | None:
        """Create an NCCL communicator and use it once [Note: communicators at once]."""
        found: dist.ProcessGroup = dist.new_group(
            members, timeout=timeout, backend="nccl", device_id=self.place
        )
        if dist.get_rank() not in members:
            return None
        dist.all_reduce(torch.zeros(1, device=self.place), group=found)
        torch.cuda.synchronize()
        return found

    def peak_bytes(self) -> int | None:
        """Return what the caching allocator had allocated at most."""
        return int(torch.cuda.max_memory_allocated(self.place))

"""What a rank computes on: where tensors are, streams of work, and moments in them.

[Note: issued and done]
The host of a rank issues tasks; on a GPU they run later. So a task that waits for another needs two things:
the host must have issued the other one, and the stream must have come to its end. `mark` names a moment in
the work of the current stream, `wait` lets the current stream go on only after it. On a CPU what is issued is
done, and a mark is the time.

[Note: memory of several streams]
The caching allocator gives memory back to the stream that it was allocated on, at once, although another
stream may still read it. Whoever reads a tensor says so (`used_here`), which delays that until the reading
stream has come so far.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Mark = Any
"""A moment in the work of a stream."""


class Device(Protocol):
    """What all kinds of devices can do.

    Attributes:
        name: "cpu" or "cuda".
        place: where tensors are.
        threads: whether each stream has a thread of its own that issues its tasks; else one thread issues all
            tasks in the plan's order, as communicators that share a device need.
        counts_bytes: whether the ledger can count tensors here: what autograd lets go must be let go by the
            thread that runs the task.
    """

    name: str
    place: torch.device
    threads: bool
    counts_bytes: bool

    def on_stream(self, name: str) -> AbstractContextManager[Any]:
        """Let what this thread issues inside the block go to a stream."""

    def mark(self) -> Mark:
        """Return the moment at which the current stream will have done all that was issued to it."""

    def wait(self, mark: Mark) -> None:
        """Let the current stream go on only after a moment of any stream."""

    def reach(self, mark: Mark, *, limit_s: float) -> None:
        """Let the host wait for a moment; raises RunFailedError after `limit_s` seconds."""

    def ns(self, mark: Mark) -> int:
        """Return when a moment that was reached was, on the clock of `time.perf_counter_ns`."""

    def used_here(self, tensor: Tensor) -> None:
        """Say that the current stream reads a tensor that another one may have made."""

    def group(self, members: list[int], *, timeout: timedelta) -> dist.ProcessGroup | None:
        """Create a process group for tensors of this device, on every rank; None where it is not a member."""

    def peak_bytes(self) -> int | None:
        """Return the highest bytes allocated so far, or None where the ledger counts them."""

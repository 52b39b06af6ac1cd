"""A rank on CPU cores: a thread for each stream, gloo between ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from piper.runtime.devices.device import Mark


class CpuDevice:
    """What is issued is done when the call returns, so there is nothing to wait for."""

    name = "cpu"
    place = torch.device("cpu")
    threads = True
    counts_bytes = True

    def on_stream(self, _name: str) -> AbstractContextManager[Any]:
        """Do nothing: the thread is the stream."""
        return nullcontext()

    def mark(self) -> Mark:
        """Return the time."""
        return perf_counter_ns()

    def wait(self, mark: Mark) -> None:
        """Do nothing: it is past."""

    def reach(self, mark: Mark, *, limit_s: float) -> None:
        """Do nothing: it is past."""

    def ns(self, mark: Mark) -> int:
        """Return the time that the mark is."""
        return int(mark)

    def used_here(self, tensor: Tensor) -> None:
        """Do nothing: memory lives as long as somebody reads it."""

    def group(self, members: list[int], *, timeout: timedelta) -> dist.ProcessGroup | None:
        """Create a gloo group."""
        found: dist.ProcessGroup = dist.new_group(members, timeout=timeout, backend="gloo")
        return found if dist.get_rank() in members else None

    def peak_bytes(self) -> int | None:
        """Return None: the ledger counts."""
        return None

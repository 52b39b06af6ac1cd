"""Streams of a CPU rank: stream 0 is the main thread, any other is a thread that runs its tasks in turn.

So a missing wait shows as it would on a GPU, and transfers run while the main thread computes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]


class StreamThread(threading.Thread):
    """Runs submitted jobs in turn; a daemon, so that a stuck transfer does not keep the process."""

    def __init__(self, name: str) -> None:
        super().__init__(name=f"stream {name}", daemon=True)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()

    def submit(self, job: Job) -> None:
        """Append a job."""
        self._jobs.put(job)

    def finish(self) -> None:
        """Let the thread end after the jobs that it has."""
        self._jobs.put(None)

    def run(self) -> None:
        """Run jobs until `finish`."""
        while (job := self._jobs.get()) is not None:
            job()

"""Who runs the simulations of a search: this process, processes of this machine, or a Ray cluster.

An executor takes strategies and yields (position, result) as they are done, in any order. What a search does
with them does not depend on that order, nor on how many run at once. To add one: a generator function as
below, and a line in `EXECUTORS`.

[Note: workers that are left alone]
An interrupt goes to every process of a terminal: workers leave it to the one that collects results, which
cancels what has not begun. A worker whose parent was killed ends itself.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from piper.errors import JobError

if TYPE_CHECKING:
    from piper.predict import Job
    from piper.search.candidate import Candidate
    from piper.search.evaluate import Evaluator

Result = dict[str, Any]
Run = Callable[[Sequence["Candidate"]], Iterator[tuple[int, Result]]]
"""Simulate strategies; yield position and result of each."""

_WATCH_S = 1.0
"""How often a worker looks whether its parent is still there."""


@contextmanager
def executor_of(name: str, evaluator: Evaluator, jobs: int) -> Iterator[Run]:
    """Give what simulates strategies, and take it down afterwards.

    Args:
        name: of `EXECUTORS`.
        evaluator: of the job, in this process.
        jobs: how many simulations run at once.

    Raises: JobError if it cannot be used here.
    """
    with EXECUTORS[name](evaluator, jobs) as run:
        yield run


@contextmanager
def local(evaluator: Evaluator, jobs: int) -> Iterator[Run]:
    """Run in this process, or in as many processes as there are jobs."""
    if jobs == 1:
        yield lambda batch: ((i, evaluator.simulate(candidate)) for i, candidate in enumerate(batch))
        return
    pool = ProcessPoolExecutor(jobs, initializer=_start, initargs=(*evaluator.asked, os.getpid()))
    try:
        yield lambda batch: _from_pool(pool, batch)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _from_pool(pool: ProcessPoolExecutor, batch: Sequence[Candidate]) -> Iterator[tuple[int, Result]]:
    from piper.search.evaluate import simulate_in_worker

    position = {pool.submit(simulate_in_worker, [candidate]): i for i, candidate in enumerate(batch)}
    for future in as_completed(position):
        yield position[future], future.result()[0]


def _start(job: Job, reserve_bytes: int, only_runnable: bool, parent: int) -> None:  # noqa: PLR0917
    """Make a process a worker; see [Note: workers that are left alone]."""
    from piper.search.evaluate import start_worker

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    start_worker(job, reserve_bytes, only_runnable)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os._exit(1)


@contextmanager
def ray(evaluator: Evaluator, jobs: int) -> Iterator[Run]:
    """Run as actors of a Ray cluster: the one at RAY_ADDRESS, else one that is started on this machine."""
    try:
        import ray as cluster
    except ImportError as problem:
        raise JobError(
            where="--executor", field="executor", value="ray", rule=f"cannot be used: {problem}",
            fix="pip install 'piper-train[ray]', or take --executor local",
        ) from problem  # fmt: skip

    own = not cluster.is_initialized()
    if own:
        cluster.init(
            address=os.environ.get("RAY_ADDRESS"), logging_level="error", log_to_driver=False,
            **({} if os.environ.get("RAY_ADDRESS") else {"num_cpus": jobs, "include_dashboard": False}),
        )  # fmt: skip
    actors = [cluster.remote(_Actor).remote(*evaluator.asked) for _ in range(jobs)]
    try:
        yield lambda batch: _from_actors(cluster, actors, batch)
    finally:
        for actor in actors:
            cluster.kill(actor)
        if own:
            cluster.shutdown()


class _Actor:
    """Holds the model of a job in a process of a cluster."""

    def __init__(self, job: Job, reserve_bytes: int, only_runnable: bool) -> None:
        from piper.search.evaluate import Evaluator

        self._evaluator = Evaluator(job=job, reserve_bytes=reserve_bytes, only_runnable=only_runnable)

    def simulate(self, candidate: Candidate) -> Result:
        """Return the shortened result of a full simulation."""
        return self._evaluator.simulate(candidate)


def _from_actors(
    cluster: Any, actors: Sequence[Any], batch: Sequence[Candidate]
) -> Iterator[tuple[int, Result]]:
    """Give each actor its next strategy as soon as it has done one."""
    waiting = list(enumerate(batch))[::-1]
    running: dict[Any, tuple[int, Any]] = {}
    for actor in actors[: len(waiting)]:
        _give(actor, waiting, running)
    while running:
        (done, *_), _ = cluster.wait(list(running), num_returns=1)
        position, actor = running.pop(done)
        yield position, cluster.get(done)
        if waiting:
            _give(actor, waiting, running)


def _give(actor: Any, waiting: list[tuple[int, Candidate]], running: dict[Any, tuple[int, Any]]) -> None:
    position, candidate = waiting.pop()
    running[actor.simulate.remote(candidate)] = (position, actor)


EXECUTORS = {"local": local, "ray": ray}

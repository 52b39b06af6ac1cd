"""Watch forked ranks: the first that fails, dies or falls silent ends the job, and is named once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from piper.errors import RunFailedError
from piper.runtime.progress import Phase, ProgressBoard, Standing
from simulator.plan import NONE, Plan

_POLL_S = 0.1
_GRACE_S = 1.0
"""After a failed transfer we wait so long for the failure that caused it: a dead peer is seen in 0.01 s."""

_REAP_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A forked rank and the pipe on which it sends ("done", outcome) or ("failed", text, echo)."""

    rank: int
    process: BaseProcess
    pipe: Connection


class Interruption:
    """The first Ctrl-C asks for an end after the step under way, the second for one at once.

    Args:
        board: tells the ranks.
    """

    def __init__(self, board: ProgressBoard) -> None:
        self._board = board
        self._unheard = False
        self.asked = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGINT, where it would raise KeyboardInterrupt."""
        here = threading.current_thread() is threading.main_thread()
        if not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, lambda *_: self._hear())
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _hear(self) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = self._unheard = True
        self._board.close()

    def obey(self) -> None:
        """Name the last step, once; raises KeyboardInterrupt where no step has begun."""
        if self._unheard:
            self._unheard = False
            if not self._board.name_last_step():
                raise KeyboardInterrupt


def watch(children: Sequence[Child], board: ProgressBoard, plan: Plan, *, timeout_s: float) -> Any:
    """Return what rank 0 sends when all ranks are done, and whether they were interrupted.

    Raises: RunFailedError naming the culprit, as soon as a rank fails, dies, or is silent for `timeout_s`;
        KeyboardInterrupt when interrupted before the first step, or twice.
    """
    interruption = Interruption(board)
    with interruption.listening():
        outcome = _watch(children, board, plan, interruption=interruption, timeout_s=timeout_s)
    return outcome, interruption.asked


def _watch(
    children: Sequence[Child],
    board: ProgressBoard,
    plan: Plan,
    *,
    interruption: Interruption,
    timeout_s: float,
) -> Any:
    open_children = {child.rank: child for child in children}
    outcome: Any = None
    echoes: list[str] = []
    deadline: float | None = None
    while open_children:
        handles: list[Any] = [h for c in open_children.values() for h in (c.pipe, c.process.sentinel)]
        wait(handles, timeout=_POLL_S)
        interruption.obey()
        for child in list(open_children.values()):
            message = _message(child)
            if message is None:
                continue
            del open_children[child.rank]
            match message:
                case ("done", found):
                    outcome = found if child.rank == 0 else outcome
                case ("failed", text, True):
                    echoes.append(text)
                case ("failed", text, _):
                    raise RunFailedError(text)
                case _:
                    raise RunFailedError(_death(child, board, plan))
        if echoes:
            deadline = deadline or time.monotonic() + _GRACE_S
            if time.monotonic() > deadline or not open_children:
                raise RunFailedError(echoes[0])
        else:
            _check_silence(sorted(open_children), board, plan, timeout_s=timeout_s)
    return outcome


def end(children: Sequence[Child]) -> None:
    """Kill whatever still runs and collect it."""
    for child in children:
        if child.process.is_alive():
            child.process.kill()
    for child in children:
        child.process.join(_REAP_S)
        child.pipe.close()


def _message(child: Child) -> tuple[Any, ...] | None:
    """Return the rank's last word, ("died",) when it ended without one, or None while it runs."""
    alive = child.process.is_alive()
    try:
        if child.pipe.poll():
            message: tuple[Any, ...] = child.pipe.recv()
            return message
    except (EOFError, OSError):
        pass
    if alive:
        return None
    child.process.join()
    return ("died",)


def _death(child: Child, board: ProgressBoard, plan: Plan) -> str:
    code = child.process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"rank {child.rank} {how} {_doing(child.rank, board.standing(child.rank), plan)}"


def _check_silence(ranks: Sequence[int], board: ProgressBoard, plan: Plan, *, timeout_s: float) -> None:
    """Blame a rank that is silent in a task of its own; if all only wait for each other, say so."""
    now = time.monotonic_ns()
    standings = {rank: board.standing(rank) for rank in ranks}
    silent = {rank: s for rank, s in standings.items() if now - s.since_ns > timeout_s * 1e9}
    for rank, standing in silent.items():
        if standing.phase not in {Phase.WAITING, Phase.MEETING, Phase.DONE}:
            raise RunFailedError(f"rank {rank} was silent for {timeout_s:g} s {_doing(rank, standing, plan)}")
    if silent and len(silent) == len(standings):
        stuck = "; ".join(f"rank {rank} {_doing(rank, s, plan)}" for rank, s in silent.items())
        raise RunFailedError(f"no rank made progress for {timeout_s:g} s: {stuck}")


def _doing(rank: int, standing: Standing, plan: Plan) -> str:
    codes = plan.device_plans[plan.pipeline_rank_of(rank)].codes()
    at = codes[standing.position] if standing.position != NONE else ""
    match standing.phase:
        case Phase.STARTING:
            return "while starting"
        case Phase.RUNNING:
            return f"in {at} (step {standing.step})"
        case Phase.WAITING:
            return f"before {at} (step {standing.step}), waiting for {codes[standing.waits_for]}"
        case Phase.MEETING:
            return "while meeting the other ranks"
        case Phase.VERIFYING:
            return "while computing the reference"
        case Phase.DONE:
            return "after its last step"


def die_with_parent() -> None:
    """Ask the kernel (Linux) to kill this process when its parent ends; elsewhere do nothing."""
    if os.uname().sysname == "Linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, see prctl(2)

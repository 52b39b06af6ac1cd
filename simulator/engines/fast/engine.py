"""The fast engine: Workload in, times out; `kernel` does the work, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.engines import EngineRun, Settled
from simulator.engines.fast.kernel import (
    DISPATCH,
    END,
    GROUP,
    PENDING,
    READY,
    START,
    STREAM,
    TASK,
    lay_out,
    run_steps,
)
from simulator.errors import IllegalPlanError
from simulator.hang import Hang
from simulator.plan import NONE
from simulator.workload import Workload

Ints = npt.NDArray[np.int64]


def run(workload: Workload, *, max_steps: int, settled: Settled) -> EngineRun:
    """Run the workload; see `simulator.engines.Engine`."""
    arrays = _arrays(workload, max_steps=max_steps)
    times, num_tasks = arrays["times"], workload.num_tasks
    step_end: list[int] = []
    for step in range(max_steps):
        if run_steps(step, step, *arrays.values()) < max(num_tasks, 1):
            raise _hang(workload, arrays, reached=step + 1, max_steps=max_steps)
        step_end.append(int(times[END, step * num_tasks : (step + 1) * num_tasks].max()))
        if settled(step_end):
            break

    def table(row: int) -> Ints:
        found: Ints = times[row, : len(step_end) * num_tasks].reshape(len(step_end), num_tasks)
        return found

    return EngineRun(
        dispatch_ns=table(DISPATCH),
        ready_ns=table(READY),
        start_ns=table(START),
        end_ns=table(END),
        step_end_ns=np.array(step_end, dtype=np.int64),
    )


def _arrays(workload: Workload, *, max_steps: int) -> dict[str, npt.NDArray[Any]]:
    """Return what `run_steps` takes, in its order; times that it never reaches are never touched."""
    tasks, streams = np.empty(workload.num_tasks, dtype=TASK), np.zeros(workload.num_streams, dtype=STREAM)
    columns = ("duration_ns", "launch_ns", "host_ns", "stream", "partner", "collective")
    flags = ("is_compute", "is_host_copy", "is_send", "eager")
    lay_out(tasks, streams, *(_flat(getattr(workload, name)) for name in (*columns, *flags)))
    return {
        "tasks": tasks,
        "times": np.empty((4, workload.num_tasks * max_steps), dtype=np.int64),
        "streams": streams,
        "groups": _groups(workload),
        "members": _flat(workload.members.values),
        "todo": np.zeros(workload.num_streams + 1, dtype=np.int64),
        "device_starts": _flat(workload.device_starts),
        "wait_starts": _flat(workload.waits.starts),
        "waits": _flat(workload.waits.values),
        "previous_starts": _flat(workload.previous_step_waits.starts),
        "previous_waits": _flat(workload.previous_step_waits.values),
    }


def _flat(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a column in the one layout that the kernel is compiled for."""
    return np.require(column, requirements=["C", "W"])


def _groups(workload: Workload) -> npt.NDArray[Any]:
    groups = np.zeros(len(workload.members.starts) - 1, dtype=GROUP)
    groups["first"] = workload.members.starts[:-1]
    groups["last"] = workload.members.starts[1:]
    return groups


def _hang(
    workload: Workload, arrays: dict[str, npt.NDArray[Any]], *, reached: int, max_steps: int
) -> IllegalPlanError:
    """Say who waits for whom, once every stream has gone as far into the later steps as it can."""
    if reached < max_steps:
        run_steps(reached, max_steps - 1, *arrays.values())
    limit = max_steps * workload.num_tasks
    streams = arrays["streams"]
    heads = np.where(streams["task"] == PENDING, NONE, streams["offset"] + streams["task"])
    heads[heads >= limit] = NONE
    end, joined = arrays["times"][END], arrays["times"][READY]
    hang = Hang(workload=workload, heads=heads.tolist(), end=end, joined=joined)
    return IllegalPlanError(where="simulate: the plan hangs", violations=hang.sentences())

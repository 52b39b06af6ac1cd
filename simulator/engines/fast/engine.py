"""The fast engine: Workload in, times out; `kernel` does the work, `shared_kernel` under sharing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.engines import EngineRun, Settled
from simulator.engines.fast.arrays import Arrays, flat, shared_arrays
from simulator.engines.fast.kernel import (
    DISPATCH,
    END,
    ENDED,
    GROUP,
    HOST,
    JOINED,
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
from simulator.sharing import Sharing
from simulator.workload import Workload

Ints = npt.NDArray[np.int64]


def run(workload: Workload, *, max_steps: int, settled: Settled) -> EngineRun:
    """Run the workload; see `simulator.engines.Engine`."""
    arrays = _arrays(workload, max_steps=max_steps)
    times, num_tasks = arrays["times"], workload.num_tasks
    go_on = (
        _one_step(workload, arrays)
        if workload.sharing is None
        else _shared_step(workload, workload.sharing, arrays, max_steps=max_steps)
    )
    step_end: list[int] = []
    for step in range(max_steps):
        if num_tasks == 0 or not go_on(step):
            raise _hang(workload, arrays, reached=step + 1, max_steps=max_steps)
        step_end.append(int(times[step * num_tasks : (step + 1) * num_tasks, END].max()))
        if settled(step_end):
            break

    def table(row: int) -> Ints:
        found: Ints = times[: len(step_end) * num_tasks, row].reshape(len(step_end), num_tasks)
        return found

    return EngineRun(
        dispatch_ns=table(DISPATCH),
        ready_ns=table(READY),
        start_ns=table(START),
        end_ns=table(END),
        step_end_ns=np.array(step_end, dtype=np.int64),
    )


def _one_step(workload: Workload, arrays: Arrays) -> Callable[[int], bool]:
    """Return what runs a step to its end, and tells whether it has one."""

    def go_on(step: int) -> bool:
        ended: int = run_steps(step, flat(workload.step_duration_ns(step)), *arrays.values())
        return ended == workload.num_tasks

    return go_on


def _shared_step(
    workload: Workload, sharing: Sharing, arrays: Arrays, *, max_steps: int
) -> Callable[[int], bool]:
    """Return the same where things are shared: steps overlap, so that all of them are under way at once."""
    from simulator.engines.fast.shared_kernel import run_until  # compiled or loaded only where it is needed

    durations = workload.duration_ns[None] if workload.noisy_ns is None else workload.noisy_ns
    more = shared_arrays(workload, sharing, max_steps=max_steps)
    both = {name: found for name, found in arrays.items() if name not in {"kept_by", "todo"}} | more
    last, processors = max_steps - 1, sharing.num_processors
    return lambda step: bool(run_until(step, last, processors, flat(durations), *both.values()))


def _arrays(workload: Workload, *, max_steps: int) -> Arrays:
    """Return what `run_steps` takes, in its order; memory that it never reaches is never touched."""
    num_tasks, streams = workload.num_tasks, np.zeros(workload.num_streams, dtype=STREAM)
    tasks = np.empty(num_tasks, dtype=TASK)
    columns = ("stream", "partner", "collective", "is_compute", "is_host_copy", "is_send", "eager")
    streams["device"] = np.repeat(np.arange(workload.num_devices), np.diff(workload.stream_starts))
    lay_out(tasks, streams, *(flat(getattr(workload, name)) for name in columns))
    return {
        "tasks": tasks,
        "times": np.empty((num_tasks * max_steps, 4), dtype=np.int64),
        "state": np.zeros(num_tasks * max_steps, dtype=np.int8),
        "streams": streams,
        "hosts": _hosts(workload),
        "groups": _groups(workload),
        "members": flat(workload.members.values),
        "launch_ns": flat(workload.launch_ns),
        "host_ns": flat(workload.host_ns),
        "host_starts": flat(workload.host_waits.starts),
        "host_waits": flat(workload.host_waits.values),
        "wait_starts": flat(workload.waits.starts),
        "waits": flat(workload.waits.values),
        "previous_starts": flat(workload.previous_step_waits.starts),
        "previous_waits": flat(workload.previous_step_waits.values),
        "kept_by": np.zeros(num_tasks, dtype=np.int32),
        "todo": np.zeros(workload.num_streams + 1, dtype=np.int64),
    }


def _hosts(workload: Workload) -> npt.NDArray[Any]:
    hosts = np.zeros(workload.num_devices, dtype=HOST)
    hosts["first"] = hosts["task"] = workload.device_starts[:-1]
    hosts["last"] = workload.device_starts[1:]
    hosts["awaited"] = PENDING
    hosts["first_stream"], hosts["last_stream"] = workload.stream_starts[:-1], workload.stream_starts[1:]
    return hosts


def _groups(workload: Workload) -> npt.NDArray[Any]:
    groups = np.zeros(len(workload.members.starts) - 1, dtype=GROUP)
    groups["first"] = workload.members.starts[:-1]
    groups["last"] = workload.members.starts[1:]
    return groups


def _hang(workload: Workload, arrays: Arrays, *, reached: int, max_steps: int) -> IllegalPlanError:
    """Say who waits for whom, once every stream has gone as far into the later steps as it can."""
    if reached < max_steps and workload.sharing is None:
        run_steps(max_steps - 1, flat(workload.duration_ns), *arrays.values())
    streams, state, times = arrays["streams"], arrays["state"], arrays["times"]
    heads = np.where(streams["task"] == PENDING, NONE, streams["offset"] + streams["task"])
    heads[heads >= len(state)] = NONE
    launched = _launched(workload, arrays["hosts"], max_steps=max_steps)
    hang = Hang(
        workload=workload,
        heads=heads.tolist(),
        end=np.where(state == ENDED, times[:, END], NONE).tolist(),
        joined=np.where(state >= JOINED, times[:, READY], NONE).tolist(),
        dispatch=np.where(launched, times[:, DISPATCH], NONE).tolist(),
    )
    return IllegalPlanError(where="simulate: the plan hangs", violations=hang.sentences())


def _launched(workload: Workload, hosts: npt.NDArray[Any], *, max_steps: int) -> npt.NDArray[np.bool_]:
    """Tell which instances have been launched, bool [instances]."""
    following = np.repeat(hosts["offset"] + hosts["task"], np.diff(workload.device_starts))
    instance = np.arange(max_steps * workload.num_tasks).reshape(max_steps, -1)
    found: npt.NDArray[np.bool_] = (instance < following).ravel()
    return found

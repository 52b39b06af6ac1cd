"""Columns of a workload -> the arrays of `shared_kernel`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.engines.fast.shared_layout import DEMAND, DEVICE, LINK, PENDING, SLOT
from simulator.plan import NONE
from simulator.sharing import Sharing
from simulator.workload import Workload

Arrays = dict[str, npt.NDArray[Any]]
Ints = npt.NDArray[np.int64]


def flat(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a column in the one layout that the kernels are compiled for."""
    return np.require(column, requirements=["C", "W"])


def shared_arrays(workload: Workload, sharing: Sharing, *, max_steps: int) -> Arrays:
    """Return what `run_until` takes behind the arrays of `run_steps`, in its order."""
    slots = np.zeros(workload.num_streams, dtype=SLOT)
    slots["place"] = slots["number"] = slots["task"] = PENDING
    device_of = np.repeat(np.arange(workload.num_devices), np.diff(workload.device_starts))
    driver = _drivers(workload)
    driven = np.flatnonzero(driver != NONE)
    devices = np.zeros(workload.num_devices, dtype=DEVICE)
    devices["first_stream"], devices["last_stream"] = workload.stream_starts[:-1], workload.stream_starts[1:]
    starts, drivers = _lists(device_of[driven], driver[driven], rows=workload.num_devices)
    devices["first_driver"], devices["last_driver"] = starts[:-1], starts[1:]
    links = np.zeros(sharing.num_links, dtype=LINK)
    links["number"] = PENDING
    starts, link_slots = _lists(*_loads(workload, sharing, driver), rows=sharing.num_links)
    links["first_slot"], links["last_slot"] = starts[:-1], starts[1:]

    def empty(size: int) -> Ints:
        return np.zeros(size + 1, dtype=np.int64)

    streams, steps = workload.num_streams, max_steps
    return {
        "slots": slots,
        "devices": devices,
        "demands": _demands(sharing),
        "links": links,
        "link_numbers": flat(sharing.links),
        "uses": flat(sharing.uses),
        "link_slots": link_slots,
        "drivers": drivers,
        "priority": flat(sharing.priority),
        "kept": np.full(workload.num_tasks * steps, PENDING, dtype=np.int64),
        "remaining": np.full(steps, workload.num_tasks, dtype=np.int64),
        "heap": empty(streams),
        "todo": empty(streams),
        "ended": empty(streams),
        "fresh": empty(streams),
        "flows": empty(streams),
        "looked_at": empty(sharing.num_links),
        "changed": empty(streams),
        "unsettled_links": empty(sharing.num_links),
        "unsettled_devices": empty(workload.num_devices),
    }


def _demands(sharing: Sharing) -> npt.NDArray[Any]:
    demands = np.zeros(len(sharing.growth), dtype=DEMAND)
    demands["latency"] = sharing.latency_ns
    demands["first"], demands["last"] = sharing.link_starts[:-1], sharing.link_starts[1:]
    for name in ("growth", "memory", "processor_part", "memory_part"):
        demands[name] = getattr(sharing, name)
    return demands


def _drivers(workload: Workload) -> Ints:
    """Return by task the stream of the task that drives its communication or copy; computations: NONE."""
    sends = np.where(
        workload.is_send | (workload.partner == NONE), np.arange(workload.num_tasks), workload.partner
    )
    driver = workload.stream[sends]
    if len(workload.members.values):
        first = workload.members.values[workload.members.starts[:-1]]
        joined = workload.collective != NONE
        driver = np.where(joined, workload.stream[first[np.where(joined, workload.collective, 0)]], driver)
    return np.where(workload.is_compute, NONE, driver)


def _loads(workload: Workload, sharing: Sharing, driver: Ints) -> tuple[Ints, Ints]:
    """Return (link, slot) for every link that a flow of the slot may load."""
    driven = np.flatnonzero(driver != NONE)
    row = np.where(workload.price == NONE, len(sharing.growth) - 1, workload.price)[driven]
    pairs = np.unique(np.stack([row, driver[driven]]), axis=1)
    counts = np.diff(sharing.link_starts)[pairs[0]]
    first = np.repeat(sharing.link_starts[pairs[0]] - np.cumsum(counts) + counts, counts)
    return sharing.links[first + np.arange(len(first))], np.repeat(pairs[1], counts)


def _lists(row: Ints, value: Ints, *, rows: int) -> tuple[Ints, Ints]:
    """Return (starts, values): by row its distinct values, rising."""
    pairs = np.unique(np.stack([row, value]), axis=1)
    starts = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(pairs[0], minlength=rows), out=starts[1:])
    return starts, flat(pairs[1])

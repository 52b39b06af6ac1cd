"""Columns of a workload -> the arrays of `shared_kernel`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.engines.fast.shared_layout import DEMAND, DEVICE, HOLDS, LINK, PENDING, SLOT
from simulator.plan import NONE
from simulator.sharing import Sharing
from simulator.sharing.driving import driving_stream
from simulator.workload import Workload

Arrays = dict[str, npt.NDArray[Any]]
Ints = npt.NDArray[np.int64]


def flat(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a column in the one layout that the kernels are compiled for."""
    return np.require(column, requirements=["C", "W"])


def shared_arrays(workload: Workload, sharing: Sharing, *, max_steps: int) -> Arrays:
    """Return what `run_until` takes behind the arrays of `run_steps`, in order."""
    streams, num_devices = workload.num_streams, workload.num_devices
    slots = np.zeros(streams, dtype=SLOT)
    slots["place"] = slots["number"] = slots["task"] = PENDING
    slot = driving_stream(workload, stream=workload.stream, is_compute=workload.is_compute)
    row = np.where(workload.price == NONE, len(sharing.growth) - 1, workload.price)
    kinds, kind = _pairs(row, slot - NONE, width=streams + 1)
    kinds[1] += NONE
    holds = np.empty(workload.num_tasks, dtype=HOLDS)
    holds["row"], holds["processors"] = kind, sharing.processors
    links, devices = np.zeros(sharing.num_links, dtype=LINK), np.zeros(num_devices, dtype=DEVICE)
    links["number"] = PENDING
    devices["first_stream"], devices["last_stream"] = workload.stream_starts[:-1], workload.stream_starts[1:]
    on_links = _entries(kinds, sharing)
    link_slots, link_places = _slots_of(links, sharing.links[on_links.entry], kinds[1][on_links.kind])
    on_devices, device_numbers = _members(workload, sharing, kinds=kinds, kind=kind)
    device_slots, device_places = _slots_of(devices, device_numbers, kinds[1][on_devices.kind])

    def empty(size: int) -> Ints:
        return np.zeros(size + 1, dtype=np.int64)

    return {
        "holds": holds,
        "slots": slots,
        "devices": devices,
        "demands": _demands(sharing, kinds[0], on_links=on_links.starts, on_devices=on_devices.starts),
        "links": links,
        "link_numbers": flat(sharing.links[on_links.entry]),
        "uses": flat(sharing.uses[on_links.entry]),
        "link_slots": link_slots,
        "link_places": link_places,
        "link_now": np.zeros(len(link_slots)),
        "device_numbers": flat(device_numbers),
        "device_places": device_places,
        "device_slots": device_slots,
        "device_now": np.zeros(len(device_slots)),
        "priority": flat(sharing.priority),
        "kept_by": np.zeros(workload.num_tasks * max_steps, dtype=np.int32),
        "remaining": np.full(max_steps, workload.num_tasks, dtype=np.int64),
        "heap": empty(streams),
        "todo": empty(streams),
        "ended": empty(streams),
        "fresh": empty(streams),
        "flows": empty(streams),
        "looked_at": empty(sharing.num_links),
        "changed": empty(streams),
        "unsettled_links": empty(sharing.num_links),
        "unsettled_devices": empty(num_devices),
        "found": empty(streams),
        "starts": empty(streams),
        "numbers": empty(len(link_slots)),
        "amounts": np.zeros(len(link_slots)),
        "growth": np.zeros(streams),
        "used": np.zeros(sharing.num_links),
        "grown": np.zeros(sharing.num_links),
        "speeds": np.zeros(streams),
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Entries:
    """Lists by kind of flow: kind i has `entry[starts[i]:starts[i + 1]]`; `kind` says it for each entry."""

    starts: Ints
    kind: Ints
    entry: Ints


def _lists(kind: Ints, entry: Ints, *, kinds: int) -> _Entries:
    starts = np.zeros(kinds + 1, dtype=np.int64)
    np.cumsum(np.bincount(kind, minlength=kinds), out=starts[1:])
    return _Entries(starts=starts, kind=kind, entry=entry)


def _pairs(first: Ints, second: Ints, *, width: int) -> tuple[Ints, Ints]:
    """Return the distinct pairs, int64 [2, pairs], rising, and which of them each is; 0 <= second < width."""
    key = first * width + second
    there = np.zeros(int(key.max(initial=0)) + 1, dtype=np.bool_)
    there[key] = True
    found = np.flatnonzero(there)
    return np.stack([found // width, found % width]), (np.cumsum(there) - 1)[key]


def _entries(kinds: Ints, sharing: Sharing) -> _Entries:
    """Return the entries of `sharing.links` by kind; computations have none."""
    first = sharing.link_starts[kinds[0]]
    counts = np.where(kinds[1] == NONE, 0, sharing.link_starts[kinds[0] + 1] - first)
    kind = np.repeat(np.arange(kinds.shape[1]), counts)
    nth = np.arange(len(kind)) - np.repeat(np.cumsum(counts) - counts, counts)
    return _lists(kind, first[kind] + nth, kinds=kinds.shape[1])


def _members(workload: Workload, sharing: Sharing, *, kinds: Ints, kind: Ints) -> tuple[_Entries, Ints]:
    """Return by kind the devices whose memory its flows take, and the device of each entry."""
    device = np.repeat(np.arange(workload.num_devices), np.diff(workload.device_starts))
    taking = (kinds[1] != NONE) & (sharing.memory[kinds[0]] > 0)
    found = np.flatnonzero(taking[kind])
    pairs, _ = _pairs(kind[found], device[found], width=workload.num_devices)
    return _lists(pairs[0], pairs[1], kinds=kinds.shape[1]), pairs[1]


def _slots_of(records: npt.NDArray[Any], number: Ints, slot: Ints) -> tuple[Ints, Ints]:
    """Return the slots of each record, rising, and the place of every (number, slot) among them."""
    pairs, place = _pairs(number, slot, width=int(slot.max(initial=0)) + 1)
    borders = np.searchsorted(pairs[0], np.arange(len(records) + 1))
    records["first_slot"], records["last_slot"] = borders[:-1], borders[1:]
    return flat(pairs[1]), flat(place)


def _demands(sharing: Sharing, row: Ints, *, on_links: Ints, on_devices: Ints) -> npt.NDArray[Any]:
    demands = np.zeros(len(row), dtype=DEMAND)
    demands["latency"] = sharing.latency_ns[row]
    demands["first"], demands["last"] = on_links[:-1], on_links[1:]
    demands["first_device"], demands["last_device"] = on_devices[:-1], on_devices[1:]
    for name in ("growth", "memory", "processor_part", "memory_part"):
        demands[name] = getattr(sharing, name)[row]
    return demands

"""What work holds of a machine while it runs alone: links, processors, memory bandwidth.

A price says how long something takes alone. These say what two things that run at once compete for; whoever
simulates them shares it out. Links are numbered over a job whose ranks fill nodes in order.

[Note: time on the wire]
The seconds of a transfer or collective are a latency, in which no bytes flow, and the rest, in which
`link_bytes` flow evenly: alone, it holds link_bytes / (seconds - latency_s) / capacity of a link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `import cost_models` stays light
    import numpy as np
    import numpy.typing as npt


class LinkKind(StrEnum):
    """One direction of one kind of link; every kind has its own range of numbers."""

    PORT_OUT = "port_out"  # one device's link to the others of its node (NVLink)
    PORT_IN = "port_in"
    BUS_OUT = "bus_out"  # what the devices of a node without a switch of their own share (PCIe, host memory)
    BUS_IN = "bus_in"
    RAIL_OUT = "rail_out"  # the network interfaces that a device uses, alone or with others
    RAIL_IN = "rail_in"
    UPLINK_OUT = "uplink_out"  # all interfaces of a node
    UPLINK_IN = "uplink_in"
    LEAF_OUT = "leaf_out"  # a leaf switch's links to the spine
    LEAF_IN = "leaf_in"
    HOST_OUT = "host_out"  # one device's link to its host, away from the device
    HOST_IN = "host_in"
    CORES = "cores"  # the cores of the host: "bytes" are seconds of one core


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Machine:
    """Everything that the ranks of one job share.

    Args:
        link_bytes_per_s: float64 [links], capacity.
        processors: of one device (streaming multiprocessors).
        memory_bytes_per_s: of one device.
        links: the numbers of each kind of link.
        describe_link: names a link for people ("uplink of node 2, out").
        cores: the link that every computing rank takes one unit a second of, or None: each has its own core.
    """

    link_bytes_per_s: npt.NDArray[np.float64]
    processors: int
    memory_bytes_per_s: float
    links: Mapping[LinkKind, range]
    describe_link: Callable[[int], str]
    cores: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommunicationUse:
    """What transfers, a collective or host copies hold, all given sets of ranks together.

    Args:
        latency_s: the part of the price in which no bytes flow; see [Note: time on the wire].
        processors: of each member, held by the kernel from when the member joins until the end.
        memory_bytes: that each member reads and writes in its own memory (of members that differ, the most).
        links: int64 [entries], numbers of links; one may appear several times: its bytes add up.
        link_bytes: float64 [entries], what crosses each.
    """

    latency_s: float
    processors: int
    memory_bytes: float
    links: npt.NDArray[np.int64]
    link_bytes: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationUse:
    """What bounds one kernel; the seconds of its price that are left are latency, which scales with nothing.

    Args:
        processor_s: seconds that grow when fewer processors are left.
        memory_s: seconds that grow when less memory bandwidth is left.
        memory_bytes: read and written in `memory_s`.
    """

    processor_s: float
    memory_s: float
    memory_bytes: float

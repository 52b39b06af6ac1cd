"""`HostSpec`: the cores of a node that its processes share, and what driving a device costs its host."""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.price import Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """The host of every node of a cluster.

    [Note: cores that processes share]
    Where calling is running (a CPU), the processes of a node compute on its cores: n of them at once run at
    min(1, cores / n) of the speed of one alone. `cores` is what they get together, which is less than the
    number of cores where these share caches, memory bandwidth, power or (threads of one core) units.
    A communication is carried by a core of each member while its bytes flow; a message also before, since
    the processes at both ends have to wake up.

    [Note: measured host costs]
    What it takes to drive a device is a matter of framework and host. The figures of a stack hold for the
    hosts of its sources; a cluster file may give those measured on its own hosts with one stack, and they
    are then used with that stack. Where calling is running they are part of the time of an operation, since
    the operation waits for its host; elsewhere the host runs ahead, and only `launch_s` is used.

    Args:
        cores: see the first note; None: every process has a core.
        stack: whose costs the others are.
        launch_s: of an operation that is called from Python, as in a forward.
        gradient_launch_s: of an operation that the autograd engine calls.
        pass_s: of a task that computes, beside its operations.
        message_s: of a message between two ranks, beside the link: the processes at both ends have to notice.
        error: see [Note: error of a figure] in `gpu.py`.
        provenance: of these figures.
    """

    cores: float | None = None
    stack: str = ""
    launch_s: float = 0.0
    gradient_launch_s: float = 0.0
    pass_s: float = 0.0
    message_s: float = 0.0
    error: float = 0.5
    provenance: Provenance = Provenance.DATASHEET

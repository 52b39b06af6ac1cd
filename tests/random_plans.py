"""Random plans that cannot hang, since their tasks are issued in one global order, and random prices."""

from __future__ import annotations

from hypothesis import strategies as st

from simulator.plan import NONE, MemoryClass, TaskKind
from tests.plans import FakeCostModel, PlanBuilder

K = TaskKind


@st.composite
def plans(draw):
    """Return a plan of up to 4 device plans; each action is appended to all devices it concerns."""
    ranks = draw(st.integers(1, 4))
    builder = PlanBuilder(pipeline_ranks=ranks, replicas=draw(st.integers(1, 3)))
    builder.held = [[] for _ in range(ranks)]
    world = builder.group("world", "dp", range(ranks))
    own = [builder.group(f"dp{rank}", "dp", [rank]) for rank in range(ranks)]
    for device in builder.devices:
        device.buffer("weights", draw(st.integers(0, 5)), MemoryClass.PARAMETERS, persistent=True)
        device.bucket("d")
    for number in range(draw(st.integers(1, 25))):
        kinds = ["compute", "compute", "own", "world", "copy"] + (["transfer"] * 3 if ranks > 1 else [])
        _append(draw, builder, draw(st.sampled_from(kinds)), number, own, world)
    for device, held in zip(builder.devices, builder.held, strict=True):
        device.compute("last", 1, K.UPDATE, waits=[], frees=held)
        _previous_step_waits(draw, device)
    return builder.build()


def _append(draw, builder, what, number, own, world):
    ranks = len(builder.devices)
    rank = draw(st.integers(0, ranks - 1))
    name = f"t{number}"
    if what == "compute":
        _compute(draw, builder, rank, name, number)
    elif what == "own":
        kind = draw(st.sampled_from([K.ALL_REDUCE, K.ALL_TO_ALL, K.RING_SHIFT]))
        builder.devices[rank].task(
            name, kind, draw(st.sampled_from(["dp", "compute"])), group=own[rank], bucket=0,
            microbatch=number, size_bytes=draw(st.integers(0, 9)), waits=_waits(draw, builder.devices[rank]),
        )  # fmt: skip
    elif what == "copy":
        kind, stream = (draw(st.sampled_from(some)) for some in ([K.OFFLOAD, K.RELOAD], ["host", "compute"]))
        builder.devices[rank].task(
            name, kind, stream, microbatch=number, phase=K.F, size_bytes=draw(st.integers(0, 9)),
            waits=_waits(draw, builder.devices[rank]),
        )  # fmt: skip
    elif what == "world":
        kind, size = draw(st.sampled_from([K.ALL_REDUCE, K.RING_SHIFT])), draw(st.integers(0, 9))
        for device in builder.devices:
            device.task(name, kind, "dp", stage=NONE, microbatch=number, group=world, size_bytes=size,
                        waits=_waits(draw, device))  # fmt: skip
    else:
        other = draw(st.integers(0, ranks - 1).filter(lambda r: r != rank))
        builder.transfer(
            rank, other, kind=draw(st.sampled_from([K.SEND_F, K.SEND_B])), name=name, microbatch=number,
            size_bytes=draw(st.integers(0, 9)), sent_after=_waits(draw, builder.devices[rank]),
            received_after=_waits(draw, builder.devices[other]),
        )  # fmt: skip


def _compute(draw, builder, rank, name, number):
    """Append a compute task that allocates a buffer and frees some of those that are held."""
    device, held = builder.devices[rank], builder.held[rank]
    device.buffer(name, draw(st.integers(0, 9)), draw(st.sampled_from(list(MemoryClass))))
    held.append(name)
    frees = [held.pop(0) for _ in range(draw(st.integers(0, len(held))))]
    kind = draw(st.sampled_from([K.F, K.B, K.BI, K.BW, K.R, K.UPDATE]))
    device.compute(name, draw(st.integers(0, 20)), kind, microbatch=number,
                   kernels=draw(st.integers(1, 3)), waits=_waits(draw, device),
                   allocates=[name], frees=frees)  # fmt: skip


def _waits(draw, device):
    return (
        draw(st.lists(st.sampled_from(list(device.names)), max_size=3, unique=True)) if device.names else []
    )


def _previous_step_waits(draw, device):
    index = draw(st.integers(0, len(device.tasks) - 1))
    device.later.append((index, tuple(_waits(draw, device))))


PRICES = st.builds(
    lambda launch, eager, transfer, collective, copy: FakeCostModel(
        launch_ns=launch,
        eager_limit_bytes=eager,
        transfer_ns=lambda size, source, target: transfer * size,
        collective_ns=lambda kind, size, ranks: collective * len(ranks),
        host_copy_ns=lambda size: copy * size,
    ),
    *[st.integers(0, 5)] * 5,
)

"""Process groups: created by every rank in one global order, one per (members, stream).

[Note: one group per stream]
Two collectives of one group must not be under way at once from different threads (gloo then delivers
wrong data without an error). So each stream has groups of its own; tagged transfers may share one group.

[Note: one group per direction]
NCCL knows no tags and works off what two ranks send each other in the order in which each of them asked for
it. So activations and gradients from one rank to another have a communicator each, and no transfer waits
behind one of the other direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from piper.errors import RunFailedError
from piper.runtime.devices.device import Device
from simulator.plan import NONE, Plan, TaskKind

GroupKey = tuple[tuple[int, ...], str]
"""(members, stream name)."""

TransferKey = tuple[int, int, str]
"""(sender, receiver, "F" or "B")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups of a rank.

    Args:
        rank: whose.
        control: all ranks, through the hosts: agreement, barriers, gathering of results.
        shared: all ranks: tagged sends and receives; None where there are no tags.
        transfers: else, those that this rank is in [Note: one group per direction].
        collectives: those that this rank is in, by members and stream.
    """

    rank: int
    control: dist.ProcessGroup
    shared: dist.ProcessGroup | None
    transfers: dict[TransferKey, dist.ProcessGroup]
    collectives: dict[GroupKey, dist.ProcessGroup]

    @classmethod
    def create(cls, plan: Plan, *, rank: int, timeout_s: float, device: Device) -> Groups:
        """Create all groups of the plan, on all ranks in one order; the default group must be initialised."""
        limit = timedelta(seconds=timeout_s)
        control = dist.new_group(timeout=limit, backend="gloo")
        tagged = device.threads
        shared = dist.new_group(timeout=limit, backend="gloo") if tagged else None
        ways = () if tagged else transfer_table(plan)
        transfers = {key: device.group(sorted(key[:2]), timeout=limit) for key in ways}
        collectives = {key: device.group(list(key[0]), timeout=limit) for key in group_table(plan)}
        return cls(
            rank=rank,
            control=control,
            shared=shared,
            transfers={key: group for key, group in transfers.items() if group is not None},
            collectives={key: group for key, group in collectives.items() if group is not None},
        )

    def of_transfer(self, kind: TaskKind, peer: int) -> dist.ProcessGroup:
        """Return the group in which this rank sends to a peer, or receives from it."""
        if self.shared is not None:
            return self.shared
        sends = kind in {TaskKind.SEND_F, TaskKind.SEND_B}
        phase = "F" if kind in {TaskKind.SEND_F, TaskKind.RECV_F} else "B"
        ends = (self.rank, peer) if sends else (peer, self.rank)
        return self.transfers[*ends, phase]


def group_table(plan: Plan) -> tuple[GroupKey, ...]:
    """Return every (members, stream) that some collective of the plan uses, sorted, without groups of one."""
    found: set[GroupKey] = set()
    for device in plan.device_plans:
        table = device.tasks
        used = sorted(set(zip(table.group.tolist(), table.stream.tolist(), strict=True)))
        for group, stream in used:
            if group != NONE and plan.groups[group].size > 1:
                found.update((members, device.streams[stream]) for members in plan.groups[group].members)
    return tuple(sorted(found))


def transfer_table(plan: Plan) -> tuple[TransferKey, ...]:
    """Return every way that some transfer of the plan takes, sorted."""
    found: set[TransferKey] = set()
    for device in plan.device_plans:
        for kind, phase in ((TaskKind.SEND_F, "F"), (TaskKind.SEND_B, "B")):
            peers = set(device.tasks.peer[device.tasks.kind == kind].tolist())
            for rank in plan.mesh.ranks(pp=device.pipeline_rank):
                found.update((rank, plan.peer_rank(rank, peer), phase) for peer in peers)
    return tuple(sorted(found))


def require_agreement(groups: Groups, *, world_size: int, what: str) -> None:
    """Raise RunFailedError unless all ranks came with the same plan and options (`what` is their digest)."""
    found: list[str] = [""] * world_size
    dist.all_gather_object(found, what, group=groups.control)
    others = [rank for rank, theirs in enumerate(found) if theirs != found[0]]
    if others:
        raise RunFailedError(
            f"ranks {others} run another plan or other options than rank 0: "
            f"{found[others[0]]} against {found[0]}. Start all ranks with the same command and version"
        )

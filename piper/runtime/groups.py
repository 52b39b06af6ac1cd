"""Process groups: created by every rank in one global order, one per (members, stream).

[Note: one group per stream]
Two collectives of one group must not be under way at once from different threads (gloo then delivers
wrong data without an error). So each stream has groups of its own; tagged transfers may share one group.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from piper.errors import RunFailedError
from simulator.plan import NONE, Plan

GroupKey = tuple[tuple[int, ...], str]
"""(members, stream name)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups of a rank.

    Args:
        control: all ranks: agreement, barriers, gathering of results.
        transfers: all ranks: tagged sends and receives.
        collectives: those that this rank is in, by members and stream.
    """

    control: dist.ProcessGroup
    transfers: dist.ProcessGroup
    collectives: dict[GroupKey, dist.ProcessGroup]

    @classmethod
    def create(cls, plan: Plan, *, rank: int, timeout_s: float) -> Groups:
        """Create all groups of the plan; the default group must be initialised."""
        limit = timedelta(seconds=timeout_s)
        control = dist.new_group(timeout=limit, backend="gloo")
        transfers = dist.new_group(timeout=limit, backend="gloo")
        made = {key: dist.new_group(list(key[0]), timeout=limit, backend="gloo") for key in group_table(plan)}
        mine = {key: group for key, group in made.items() if rank in key[0]}
        return cls(control=control, transfers=transfers, collectives=mine)


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

"""All-to-alls around experts: every row travels to the rank that has its expert, and back.

[Note: rows of experts]
Rows come sorted by expert, with the ends of each expert's rows. A rank sends each other rank the rows of its
experts, after telling how many there are for each. What arrives is sorted by sender, then expert; experts
take it by expert, then sender. The numbers of a microbatch are kept: results and gradients take the same
ways.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cost_models.errors import check_invariant
from piper.runtime.context import RankContext
from piper.runtime.step import Routing, StepState
from simulator.plan import Region, Task


def routing(context: RankContext, task: Task, ends: Tensor) -> tuple[Routing, Tensor]:
    """Return how the rows of a microbatch travel, and the ends of the rows of this rank's experts."""
    group, size = context.group(task)
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).to(torch.int64).view(size, -1)
    arriving = torch.empty_like(counts)
    if group is None:
        arriving.copy_(counts)
    else:
        dist.all_to_all_single(arriving, counts, group=group)
    known = arriving.cpu()  # the host must know how many rows to ask for
    ends_of_parts = known.flatten().cumsum(0).view_as(known)
    order = [
        torch.arange(
            int(ends_of_parts[sender, expert] - known[sender, expert]), int(ends_of_parts[sender, expert])
        )
        for expert in range(known.shape[1])
        for sender in range(size)
    ]
    found = Routing(
        sent=tuple(counts.sum(1).tolist()),
        received=tuple(known.sum(1).tolist()),
        by_expert=torch.cat(order).to(ends.device),
    )
    return found, arriving.sum(0).cumsum(0).to(ends.dtype)


def to_experts(context: RankContext, task: Task, rows: Tensor, *, ways: Routing) -> Tensor:
    """Return the rows that this rank's experts take, [received rows, ...], sorted by expert."""
    arrived = _exchanged(context, task, rows, splits=(ways.sent, ways.received))
    return arrived.index_select(0, ways.by_expert)


def from_experts(context: RankContext, task: Task, rows: Tensor, *, ways: Routing) -> Tensor:
    """Return what other ranks' experts made of this rank's rows, in the order in which they were sent."""
    sorted_by_sender = torch.empty_like(rows)
    sorted_by_sender[ways.by_expert] = rows
    return _exchanged(context, task, sorted_by_sender, splits=(ways.received, ways.sent))


def known_routing(step: StepState, task: Task, region: Region) -> Routing:
    """Return how the rows of a microbatch went into a region."""
    found = step.routings.get((task.microbatch, region.first))
    check_invariant(found is not None, f"rows of segment {region.first} were not routed")
    return found or Routing(sent=(), received=(), by_expert=torch.empty(0))


def _exchanged(
    context: RankContext, task: Task, rows: Tensor, *, splits: tuple[Sequence[int], Sequence[int]]
) -> Tensor:
    group, _ = context.group(task)
    if group is None:
        return rows
    leaving, arriving = splits
    found = rows.new_empty((sum(arriving), *rows.shape[1:]))
    dist.all_to_all_single(found, rows.contiguous(), list(arriving), list(leaving), group=group)
    return found

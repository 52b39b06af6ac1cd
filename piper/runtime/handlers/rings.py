"""RING_SHIFT: pass on what the compute stream offers, until it offers no more."""

from __future__ import annotations

import torch
import torch.distributed as dist

from piper.runtime.borders import pass_of
from piper.runtime.context import RankContext
from piper.runtime.step import StepState
from simulator.plan import Task


def shift(context: RankContext, step: StepState, task: Task) -> None:
    """Send pieces to the next rank of the ring, and take as many from the rank before."""
    ring = context.ring(step, task.microbatch, task.part, phase=pass_of(task))
    group, _ = context.group(task)
    members = context.plan.groups[task.group].of(context.rank)
    place = members.index(context.rank)
    following, before = members[(place + 1) % len(members)], members[place - 1]
    while (piece := ring.next_leaving()) is not None:
        arriving = torch.empty_like(piece)
        sending = dist.isend(piece, dst=following, group=group)
        dist.recv(arriving, src=before, group=group)
        if sending is not None:
            sending.wait()
        ring.arrived(arriving)

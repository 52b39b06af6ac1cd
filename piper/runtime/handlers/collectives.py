"""ALL_REDUCE, REDUCE_SCATTER and ALL_GATHER of buckets, tied parameters and the gradient norm."""

from __future__ import annotations

import torch
import torch.distributed as dist

from cost_models.errors import check_invariant
from piper.runtime.context import RankContext
from piper.runtime.optimizer import clip_scale
from piper.runtime.state import part_of
from piper.runtime.step import StepState
from simulator.plan import NONE, Task, TaskKind


def all_reduce(context: RankContext, step: StepState, task: Task) -> None:
    """Sum a bucket's gradients, those of tied parameters, or the squared norm over the group."""
    if task.bucket == NONE:
        _norm(context, step, task)
    elif context.routes.device.buckets[task.bucket].kind == "tied":
        _tied(context, task)
    else:
        _reduce(context, step, task)


def reduce_scatter(context: RankContext, step: StepState, task: Task) -> None:
    """Sum a bucket's gradients over the group; each rank's shard takes the place of its own part of them."""
    _reduce(context, step, task)


def all_gather(context: RankContext, step: StepState, task: Task) -> None:
    """Give every rank of the group the shards of the others: where they are kept, or in a buffer for use."""
    group, size = context.group(task)
    bucket = context.state.buckets[task.bucket]
    shard = bucket.shard_parameters().detach()
    if task.phase == NONE:
        whole, shard = bucket.parameters.detach(), shard.clone()
    else:
        whole = step.bring(task.allocates[0], numel=bucket.numel, dtype=shard.dtype)
    if group is None:
        whole.copy_(shard)
    else:
        dist.all_gather(list(whole.chunk(size)), shard, group=group)


def _reduce(context: RankContext, step: StepState, task: Task) -> None:
    """Make one level of a bucket's reduction; a run's last level adds it to the sum of the step.

    A sum over the ranks among which the bucket is cut leaves each its own shard; other sums are of that.
    """
    bucket, per_run = context.state.buckets[task.bucket], task.phase != NONE
    flat = step.brought[task.reads[0]] if per_run else bucket.gradients
    has = (0, bucket.numel) if per_run else bucket.summed
    shard = part_of(flat, has=has, wanted=bucket.shard)
    group, size = context.group(task)
    if group is not None and task.kind is TaskKind.REDUCE_SCATTER:
        shard.copy_(context.reducer.reduce_scatter(flat, group=group, size=size))
    elif group is not None:
        context.reducer.all_reduce(shard, group=group, size=size)
    if per_run and task.reads[0] in task.frees:
        bucket.shard_gradient().add_(shard)


def _tied(context: RankContext, task: Task) -> None:
    group, size = context.group(task)
    if group is None:
        return
    parts = [
        context.state.gradient_of(name) for name in context.routes.device.buckets[task.bucket].parameters
    ]
    flat = torch.cat(parts)
    context.reducer.all_reduce(flat, group=group, size=size)
    totals = torch.split(flat, [part.numel() for part in parts])
    for part, total in zip(parts, totals, strict=True):
        part.copy_(total)


def _norm(context: RankContext, step: StepState, task: Task) -> None:
    group, size = context.group(task)
    squares = step.add_squares(torch.zeros((), dtype=torch.float64, device=context.device.place))
    if group is not None:
        context.reducer.all_reduce(squares, group=group, size=size)
    limit = context.plan.training.clip_grad_norm
    check_invariant(limit is not None, "a norm without a clipping limit")
    step.grad_norm, step.clip_factor = clip_scale(float(squares), limit or 0.0)

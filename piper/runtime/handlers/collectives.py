"""ALL_REDUCE, REDUCE_SCATTER and ALL_GATHER of buckets, tied parameters and the gradient norm."""

from __future__ import annotations

import torch
import torch.distributed as dist

from cost_models.errors import check_invariant
from piper.runtime.context import RankContext
from piper.runtime.optimizer import clip_scale
from piper.runtime.step import StepState
from simulator.plan import NONE, Task


def all_reduce(context: RankContext, step: StepState, task: Task) -> None:
    """Sum a bucket's gradients, those of tied parameters, or the squared norm over the group."""
    if task.bucket == NONE:
        _norm(context, step, task)
    elif context.routes.device.buckets[task.bucket].kind == "tied":
        _tied(context, task)
    else:
        group, size = context.group(task)
        if group is not None:
            gradients = context.state.buckets[task.bucket].gradients
            context.reducer.all_reduce(gradients, group=group, size=size)


def reduce_scatter(context: RankContext, _step: StepState, task: Task) -> None:
    """Sum a bucket's gradients over the group; each rank's shard takes the place of its own part of them."""
    group, size = context.group(task)
    if group is None:
        return
    bucket = context.state.buckets[task.bucket]
    shard = context.reducer.reduce_scatter(bucket.gradients, group=group, size=size)
    bucket.shard_gradient().copy_(shard)


def all_gather(context: RankContext, _step: StepState, task: Task) -> None:
    """Give every rank of the group the shards that the others updated."""
    group, size = context.group(task)
    if group is None:
        return
    bucket = context.state.buckets[task.bucket]
    start, end = bucket.shard
    parts = list(bucket.parameters.detach().chunk(size))
    dist.all_gather(parts, bucket.parameters[start:end].clone(), group=group)


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
    if group is not None:
        context.reducer.all_reduce(step.squares, group=group, size=size)
    limit = context.plan.training.clip_grad_norm
    check_invariant(limit is not None, "a norm without a clipping limit")
    step.grad_norm, step.clip_factor = clip_scale(float(step.squares), limit or 0.0)

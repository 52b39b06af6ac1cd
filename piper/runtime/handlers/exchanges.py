"""Collectives within a microbatch: tensors and gradients on their way into regions that are cut, and out.

[Note: partial sums]
What leaves a region of tp is a part of a sum; so is the gradient of what entered it. An all-reduce adds the
parts; with sequence parallelism each rank gets the sum for its own tokens by a reduce-scatter, and what
enters is gathered.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from cost_models.errors import check_invariant
from piper.runtime.borders import Role, Value, pass_of
from piper.runtime.context import RankContext
from piper.runtime.handlers.compute import finite
from piper.runtime.local_shapes import token_dim
from piper.runtime.step import StepState
from simulator.plan import Task, TaskKind


def exchange(context: RankContext, step: StepState, task: Task) -> None:
    """Do what a collective within a microbatch is for."""
    found = context.routes.exchange(task)
    match found.role:
        case Role.ROWS:
            _agree_on_rows(context, step, task)
        case Role.AGAIN:
            for value, before, behind in context.routes.turned(task):
                tensor = _turned(context, task, step.read(task.microbatch, before), value=value)
                step.keep_gathered(task.microbatch, behind, tensor)
        case Role.CROSS if pass_of(task) is TaskKind.B:
            _turn_gradients(context, step, task)
        case Role.CROSS:
            for value, before, behind in context.routes.turned(task):
                tensor = _turned(context, task, step.read(task.microbatch, before), value=value)
                step.put(task.microbatch, behind, tensor)
        case Role.RING:
            check_invariant(False, "a ring shift")


def _turn_gradients(context: RankContext, step: StepState, task: Task) -> None:
    found = context.routes.exchange(task)
    crossing = context.routes.borders.crossing(found.border, phase=TaskKind.B)
    for value, (before, takers) in crossing.items():
        behind = (value[0], value[1], found.border, 0)
        gradient = step.take_gradient(task.microbatch, behind)
        if gradient is None:
            gradient = torch.zeros(context.shape(behind, task.microbatch))
        first = min(takers)
        order = (context.plan.segments[first].stage, first)
        step.add_gradient(task.microbatch, before, (order, _turned(context, task, gradient, value=value)))


def _turned(context: RankContext, task: Task, tensor: Tensor, *, value: Value) -> Tensor:
    """Return a tensor behind an exchange."""
    group, size = context.group(task)
    if group is None:
        return tensor
    if task.kind is TaskKind.ALL_REDUCE:
        total = tensor.clone(memory_format=torch.contiguous_format)
        context.reducer.all_reduce(total, group=group, size=size)
        return total
    facts, micro_batch = context.plan.training, context.micro_batch(task.microbatch)
    where = token_dim(
        context.whole_shape(value, task.microbatch), micro_batch=micro_batch, seq_len=facts.seq_len
    )
    parts = tensor.reshape(micro_batch, -1, *tensor.shape[1:]) if where.flat else tensor
    dim = 1 if where.flat else where.dim
    if task.kind is TaskKind.ALL_GATHER:
        every = [torch.empty_like(parts, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(every, parts.contiguous(), group=group)
        whole = torch.cat(every, dim=dim)
    else:
        pieces = torch.stack(parts.chunk(size, dim=dim))
        shard = context.reducer.reduce_scatter(pieces.reshape(-1), group=group, size=size)
        whole = shard.view(pieces.shape[1:])
    return whole.flatten(0, 1) if where.flat else whole


def _agree_on_rows(context: RankContext, step: StepState, task: Task) -> None:
    group, size = context.group(task)
    for segment, rows in step.rows.get(task.microbatch, {}).items():
        if rows.largest is not None:
            continue
        every = [torch.empty_like(rows.local) for _ in range(size)]
        if group is None:
            every = [rows.local]
        else:
            dist.all_gather(every, rows.local, group=group)
        rows.agree(torch.stack(every))
        if segment == context.routes.loss[0] and context.places.counts_loss:
            step.losses[task.microbatch] = finite(rows.loss, step, task.microbatch)

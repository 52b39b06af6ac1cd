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

from piper.runtime.borders import Role, Value, pass_of
from piper.runtime.context import RankContext
from piper.runtime.dtypes import DTYPES
from piper.runtime.handlers import rings, routing
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
                tensor = _turned(
                    context, task, step.read(task.microbatch, before, stage=task.stage), value=value
                )
                step.keep_gathered(task.microbatch, behind, tensor)
        case Role.CROSS if pass_of(task) is TaskKind.B:
            _turn_gradients(context, step, task)
        case Role.CROSS:
            _turn_tensors(context, step, task)
        case Role.RING:
            rings.shift(context, step, task)


def _turn_tensors(context: RankContext, step: StepState, task: Task) -> None:
    border = context.routes.borders.all[context.routes.exchange(task).border]
    named = context.routes.turned(task)
    if border.region.asynchronous and not border.enters:
        for _, before, _ in named:
            step.await_value(task.microbatch, before)
    tensors = {value: step.read(task.microbatch, before, stage=task.stage) for value, before, _ in named}
    if border.region.axis == "ep" and border.enters:
        tensors = _routed(context, step, task, tensors=tensors)
    else:
        tensors = {v: _crossed(context, step, task, value=v, tensor=tensor) for v, tensor in tensors.items()}
    for value, _, behind in named:
        step.put(task.microbatch, behind, tensors[value])


def _routed(
    context: RankContext, step: StepState, task: Task, *, tensors: dict[Value, Tensor]
) -> dict[Value, Tensor]:
    """Return rows and their ends as the experts of this rank take them."""
    number = context.routes.exchange(task).border
    borders = context.routes.borders
    (name,) = (value for value in tensors if borders.is_ends(number, value))
    ways, ends = routing.routing(context, task, tensors[name])
    step.routings[task.microbatch, borders.all[number].region.first] = ways
    return {
        value: ends if value == name else routing.to_experts(context, task, tensor, ways=ways)
        for value, tensor in tensors.items()
    }


def _turn_gradients(context: RankContext, step: StepState, task: Task) -> None:
    number = context.routes.exchange(task).border
    for value, (before, takers) in context.routes.borders.crossing(number, phase=TaskKind.B).items():
        behind = (value[0], value[1], number, 0)
        if context.routes.borders.is_beside(behind) and context.routes.borders.all[number].enters:
            step.await_gradients(task.microbatch, behind)
        gradient = step.take_gradient(task.microbatch, behind)
        if gradient is None:
            gradient = _no_gradient(context, step, task, name=behind)
        first = min(takers)
        order = (context.plan.segments[first].stage, first)
        turned = _crossed(context, step, task, value=value, tensor=gradient)
        step.add_gradient(task.microbatch, before, (order, turned))


def _no_gradient(context: RankContext, step: StepState, task: Task, *, name: Value) -> Tensor:
    """Return zeros for a tensor that had no influence; others take part in the exchange all the same."""
    border = context.routes.borders.all[name[2]]
    shape = context.shape(name, task.microbatch)
    if border.region.axis == "ep":
        ways = routing.known_routing(step, task, border.region)
        shape = (sum(ways.received if border.enters else ways.sent), *shape[1:])
    dtype = DTYPES[context.plan.segments[name[0]].outputs[name[1]].dtype]
    return torch.zeros(shape, dtype=dtype, device=context.device.place)


def _crossed(context: RankContext, step: StepState, task: Task, *, value: Value, tensor: Tensor) -> Tensor:
    """Return a tensor, or the gradient of one, on the other side of a border."""
    border = context.routes.borders.all[context.routes.exchange(task).border]
    if border.region.axis == "tp":
        return _turned(context, task, tensor, value=value)
    inwards = border.enters is (pass_of(task) is not TaskKind.B)
    if border.region.axis == "cp":
        return _heads_for_tokens(context, task, tensor, value=value)
    ways = routing.known_routing(step, task, border.region)
    carry = routing.to_experts if inwards else routing.from_experts
    return carry(context, task, tensor, ways=ways)


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


def _heads_for_tokens(context: RankContext, task: Task, tensor: Tensor, *, value: Value) -> Tensor:
    """Return all tokens for a part of the heads, in their order; or out of the region the reverse."""
    group, size = context.group(task)
    if group is None:
        return tensor
    border = context.routes.borders.all[context.routes.exchange(task).border]
    inwards = border.enters is (pass_of(task) is not TaskKind.B)
    tokens, heads = context.turning_dims(value, task.microbatch, border)
    order = torch.tensor([t for piece in context.places.ring[1] for t in piece], device=tensor.device)
    leaving = tensor if inwards else tensor.index_select(tokens, order)
    parts = torch.stack(leaving.chunk(size, dim=heads if inwards else tokens))
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=group)
    joined = torch.cat(tuple(arrived), dim=tokens if inwards else heads)
    return joined.index_select(tokens, order.argsort()) if inwards else joined


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
            step.keep_loss(task.microbatch, rows.loss)

"""SEND and RECV of activations and gradients, matched by tag.

[Note: receive gating]
A receive is posted when the plan's waits allow it, not as early as possible; its buffer lives from then.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from piper.runtime.borders import Value
from piper.runtime.context import RankContext
from piper.runtime.dtypes import DTYPES
from piper.runtime.step import StepState
from simulator.plan import NONE, Task, TaskKind

_STEPS_TOLD_APART = 16
"""Tags repeat after so many steps; a peer is never that far ahead (it waits for our gradients)."""


def send_activations(context: RankContext, step: StepState, task: Task) -> None:
    """Send what the target stage takes from this stage."""
    for number, value in enumerate(context.plan.edges[task.edge].values):
        name = context.routes.borders.outside(value, phase=TaskKind.F)
        _send(context, task, step.read(task.microbatch, name), message=(step.number, number))


def receive_activations(context: RankContext, step: StepState, task: Task) -> None:
    """Receive what this stage takes from the source stage."""
    for number, value in enumerate(context.plan.edges[task.edge].values):
        name = context.routes.borders.outside(value, phase=TaskKind.F)
        tensor = _receive(context, task, value, message=(step.number, number))
        step.put(task.microbatch, name, tensor, stage=task.stage)


def send_gradients(context: RankContext, step: StepState, task: Task) -> None:
    """Send the gradients of what this stage received; zeros where it had no influence on the loss."""
    edge = context.plan.edges[task.edge]
    for number, value in enumerate(edge.grad_values):
        name = context.routes.borders.outside(value, phase=TaskKind.B)
        total = step.take_gradient(task.microbatch, name, stage=edge.target_stage)
        if total is None:
            total = _empty(context, value, task.microbatch).zero_()
        _send(context, task, total, message=(step.number, number))


def receive_gradients(context: RankContext, step: StepState, task: Task) -> None:
    """Receive the gradients of what this stage sent."""
    edge = context.plan.edges[task.edge]
    for number, value in enumerate(edge.grad_values):
        gradient = _receive(context, task, value, message=(step.number, number))
        name = context.routes.borders.outside(value, phase=TaskKind.B)
        step.add_gradient(task.microbatch, name, ((edge.target_stage, NONE), gradient))


def _send(context: RankContext, task: Task, tensor: Tensor, *, message: tuple[int, int]) -> None:
    peer = context.plan.peer_rank(context.rank, task.peer)
    tag = _tag(context, task, message)
    dist.send(tensor.contiguous(), dst=peer, group=context.groups.of_transfer(task.kind, peer), tag=tag)


def _receive(context: RankContext, task: Task, value: Value, *, message: tuple[int, int]) -> Tensor:
    tensor = _empty(context, value, task.microbatch)
    peer = context.plan.peer_rank(context.rank, task.peer)
    tag = _tag(context, task, message)
    dist.recv(tensor, src=peer, group=context.groups.of_transfer(task.kind, peer), tag=tag)
    return tensor


def _empty(context: RankContext, value: Value, microbatch: int) -> Tensor:
    """Return memory for a tensor between stages."""
    segment, output = value[:2]
    return torch.empty(
        context.shape(context.routes.borders.outside(value, phase=TaskKind.F), microbatch),
        dtype=DTYPES[context.plan.segments[segment].outputs[output].dtype],
        device=context.device.place,
    )


def _tag(context: RankContext, task: Task, message: tuple[int, int]) -> int:
    """Return a number for a message that no other has while both can be under way."""
    step, number = message
    plan = context.plan
    backward = task.kind in {TaskKind.SEND_B, TaskKind.RECV_B}
    most_values = max(len(edge.values) for edge in plan.edges)
    tag = step % _STEPS_TOLD_APART
    tag = tag * len(plan.edges) + task.edge
    tag = tag * 2 + backward
    tag = tag * plan.training.num_microbatches + task.microbatch
    return tag * most_values + number

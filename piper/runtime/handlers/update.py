"""NORM and UPDATE: clip by the global norm, step the optimizer on this rank's shards."""

from __future__ import annotations

from piper.runtime.context import RankContext
from piper.runtime.optimizer import sum_of_squares
from piper.runtime.routes import counted_ranges
from piper.runtime.step import StepState
from simulator.plan import NONE, Task


def norm(context: RankContext, step: StepState, task: Task) -> None:
    """Sum the squares of the gradient elements that this rank answers for."""
    wanted = list(context.state.buckets) if task.bucket == NONE else [task.bucket]
    for index in wanted:
        bucket = context.state.buckets[index]
        begin, _ = bucket.summed
        counted = counted_ranges(context.plan, context.rank, index)
        ranges = tuple((start - begin, end - begin) for start, end in counted)
        step.add_squares(sum_of_squares(bucket.gradients, ranges))


def update(context: RankContext, step: StepState, task: Task) -> None:
    """Update the shard, write it into the compute parameters, and start the next sum of gradients at zero."""
    bucket = context.state.buckets[task.bucket]
    gradient = bucket.shard_gradient()
    if step.number == 0:
        context.state.note_reached(task.bucket)
    if context.settings.verify:
        step.evidence[task.bucket] = gradient.float().clone()
    gradient = gradient.float()
    if step.grad_norm is not None:
        gradient = gradient * step.clip_factor
    bucket.state.step(gradient)
    if bucket.state.owns_master:
        bucket.shard_parameters().copy_(bucket.state.master)
    bucket.gradients.zero_()

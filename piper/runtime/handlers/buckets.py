"""What the plan lets a task have of its buckets: gathered parameters to use, sums to add gradients to.

Both are buffers of the plan: they come to life with the task that allocates them and end with the one that
frees them, whichever streams these are on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from piper.runtime.context import RankContext
from piper.runtime.step import StepState
from simulator.plan import COMPUTE_KINDS, Task


@contextmanager
def buckets_of(context: RankContext, step: StepState, task: Task) -> Iterator[None]:
    """Let a compute task see its buckets' buffers, and free what no later task reads."""
    routes, state = context.routes, context.state
    if task.kind in COMPUTE_KINDS:
        for buffer in task.allocates:
            if buffer in routes.run_sums:
                bucket = state.buckets[routes.run_sums[buffer]]
                step.bring(buffer, numel=bucket.numel, dtype=bucket.gradients.dtype).zero_()
        for buffer in task.reads:
            if buffer in routes.run_sums:
                state.run_sums[routes.run_sums[buffer]] = step.brought[buffer]
            elif buffer in routes.brought:
                state.show(routes.brought[buffer], step.brought[buffer])
    yield
    if task.kind in COMPUTE_KINDS:
        state.hide()
        state.run_sums.clear()
    for buffer in task.frees:
        if buffer in routes.run_sums or buffer in routes.brought:
            step.drop(buffer)

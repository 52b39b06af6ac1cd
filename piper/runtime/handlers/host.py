"""OFFLOAD and RELOAD: what waits on the host, and comes back for the tasks that need it.

[Note: on the host]
The ledger counts the device's memory, so what is on the host is nobody's bytes. Optimizer state and
parameters of a bucket have their home there and visit the device around their use; activations leave it
between F and B.
"""

from __future__ import annotations

from cost_models.errors import check_invariant
from piper.runtime.context import RankContext
from piper.runtime.keeping import OnHost
from piper.runtime.step import StepState
from simulator.plan import NONE, MemoryClass, Task


def offload(context: RankContext, step: StepState, task: Task) -> None:
    """Copy to the host: activations, or what an update changed."""
    if task.bucket == NONE:
        _activations_out(context, step, task)
    elif task.phase == NONE:
        context.state.buckets[task.bucket].state.leave(context.ledger)
    else:
        _parameters_out(context, step, task)


def reload(context: RankContext, step: StepState, task: Task) -> None:
    """Copy to the device: activations for a B, parameters for their users, state for an update."""
    if task.bucket == NONE:
        step.on_host.pop((task.microbatch, task.part)).come_back()
    elif task.phase == NONE:
        context.state.buckets[task.bucket].state.come_back(context.ledger)
    else:
        _parameters_in(context, step, task)


def _activations_out(context: RankContext, step: StepState, task: Task) -> None:
    """Copy what autograd keeps of an island; nothing where an R makes all of it again."""
    island = context.routes.island_at(task, task.part)
    graph = step.graphs.get((task.microbatch, island.first))
    keeping = None if graph is None else graph.keeping
    leaving = OnHost(()) if keeping is None else keeping.take(task.part, task.size_bytes)
    exact = not context.plan.cuts.regions  # what ranks cut is planned in equal parts, rounded up
    same = leaving.size_bytes == task.size_bytes
    check_invariant(same or not exact, f"{leaving.size_bytes} bytes leave the device, not {task.size_bytes}")
    step.on_host[task.microbatch, task.part] = leaving
    leaving.leave()


def _parameters_in(context: RankContext, step: StepState, task: Task) -> None:
    bucket, (buffer,) = context.state.buckets[task.bucket], task.allocates
    for_update = task.microbatch == NONE
    memory_class = MemoryClass.PARAMETERS if for_update else MemoryClass.BUCKETS
    flat = step.bring(buffer, numel=bucket.numel, dtype=bucket.parameters.dtype, memory_class=memory_class)
    flat.copy_(bucket.at_home)
    if for_update:
        bucket.visit(flat)


def _parameters_out(context: RankContext, _step: StepState, task: Task) -> None:
    bucket = context.state.buckets[task.bucket]
    bucket.at_home.copy_(bucket.parameters)
    bucket.visit(bucket.at_home)

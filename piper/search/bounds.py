"""Lower bounds of a candidate's step time and memory, from a probe plan with one microbatch.

[Note: admissible bounds]
A bound never exceeds what the simulator says. Time, between two norm barriers: every device updates; the
first stage gathers its parameters; microbatch 0 runs down to stage s; stage s runs all its tasks one after
another; the last gradient runs back to stage 0; that is reduced. The norm all-reduce makes this chain
whole in every step; without it only the tasks of the busiest stage count. Memory: what is static, plus
what F keeps for as many microbatches as the schedule must hold at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cost_models.price import CostModel
from simulator import build_workload
from simulator.plan import DevicePlan, MemoryClass, Plan, TaskKind


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProbe:
    """What one stage costs for one microbatch; durations without host and waiting.

    Args:
        forward_ns, backward_ns: F; all R and B.
        drain_ns: B alone (an R may run before the gradient arrives).
        update_ns: update (once per step).
        reduce_ns, gather_ns: data-parallel collectives.
        static_bytes: what always lives.
        kept_bytes: what F keeps until B.
        received_bytes: activation received before F and kept until B.
    """

    forward_ns: int
    backward_ns: int
    drain_ns: int
    update_ns: int
    reduce_ns: int
    gather_ns: int
    static_bytes: int
    kept_bytes: int
    received_bytes: int


def probe_stages(plan: Plan, cost_model: CostModel) -> tuple[StageProbe, ...]:
    """Return the costs of every pipeline rank of a plan with one microbatch."""
    workload = build_workload(plan, cost_model)
    starts = workload.device_starts.tolist()
    return tuple(
        _probe(device, workload.duration_ns[first:last])
        for device, first, last in zip(plan.device_plans, starts, starts[1:], strict=False)
    )


def step_time_bound_ns(stages: tuple[StageProbe, ...], *, num_microbatches: int, has_barrier: bool) -> int:
    """Return a lower bound of the step time."""
    busiest = max(
        num_microbatches * (stage.forward_ns + stage.backward_ns) + stage.update_ns for stage in stages
    )
    if not has_barrier:
        return busiest
    chains = []
    fill = drain = 0
    for stage in stages:
        work = num_microbatches * (stage.forward_ns + stage.backward_ns)
        chains.append(fill + work + drain)
        fill += stage.forward_ns
        drain += stage.drain_ns
    ends = stages[0].update_ns + stages[0].gather_ns + stages[0].reduce_ns
    return max(busiest, max(chains) + ends)


def memory_bound_bytes(
    stages: tuple[StageProbe, ...], *, num_microbatches: int, schedule: str
) -> tuple[int, int]:
    """Return a lower bound of the worst rank's peak, and that pipeline rank."""
    bounds = []
    for rank, stage in enumerate(stages):
        held = num_microbatches if schedule == "gpipe" else min(num_microbatches, len(stages) - rank)
        bounds.append(stage.static_bytes + held * (stage.kept_bytes + stage.received_bytes))
    worst = max(range(len(bounds)), key=bounds.__getitem__)
    return bounds[worst], worst


def _probe(device: DevicePlan, duration_ns: np.ndarray[tuple[int], np.dtype[np.int64]]) -> StageProbe:
    kind = device.tasks.kind

    def total(*kinds: TaskKind) -> int:
        return int(duration_ns[np.isin(kind, np.array(kinds))].sum())

    reduces = [TaskKind.REDUCE_SCATTER, TaskKind.ALL_REDUCE]
    in_bucket = np.isin(kind, np.array(reduces)) & (device.tasks.bucket >= 0)
    return StageProbe(
        forward_ns=total(TaskKind.F),
        backward_ns=total(TaskKind.B, TaskKind.R),
        drain_ns=total(TaskKind.B),
        update_ns=total(TaskKind.UPDATE),
        reduce_ns=int(duration_ns[in_bucket].sum()),
        gather_ns=total(TaskKind.ALL_GATHER),
        static_bytes=device.buffers.static_bytes,
        kept_bytes=_allocated(device, TaskKind.F),
        received_bytes=_allocated(device, TaskKind.RECV_F),
    )


def _allocated(device: DevicePlan, kind: TaskKind) -> int:
    """Return the activation bytes that the tasks of a kind bring to life."""
    table, buffers = device.tasks, device.buffers
    numbers = [b for i in np.flatnonzero(table.kind == kind).tolist() for b in table.allocates.row(i)]
    kept = [b for b in numbers if buffers.memory_class[b] == MemoryClass.ACTIVATIONS]
    return int(buffers.size_bytes[kept].sum())
